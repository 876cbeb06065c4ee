"""What the tools cost on a GPU, as ratios to the plain forward pass or step in the same run.

    PYTHONPATH=src python3 benchmarks/gpu.py [--json FILE] [--only NAME...]

Needs torch, torchvision and transformers; no weights are loaded. Everything in a row takes turns, and medians are
compared; beside each row stands how many values are wrong, judged by bare cloning hooks in the very same pass. A turn
is one call, after which the device is waited for, where no row says otherwise; with ``--calls`` it is several, as in a
loop over batches. ``--tiny`` shrinks everything, so that the program itself can be tried on any machine.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from bare import Bare, Newest, clone, count_wrong, judged, leaves, nothing, same, to_host
from gpu_disk import to_disk
from gpu_models import STAGES, Sizes, gpt2_medium, llama, resnet50, trainer
from results import Report, Row
from timing import Held, ratios
from torch import Tensor, nn

import torchhook as th
from torchhook import edits

Run = Callable[[], object]
Way = Run | Held
Goals = tuple[float | None, float | None]


class Bench:
    """Sizes, patience, and the ways that several rows share."""

    def __init__(self, sizes: Sizes, seconds: float, calls: int) -> None:
        self.sizes, self.seconds, self.calls = sizes, seconds, calls
        self.turns = 1 if sizes.tiny else 4

    def wait(self) -> None:
        if self.sizes.device == "cuda":
            torch.cuda.synchronize()

    def rows(
        self,
        work: str,
        plain: Run,
        beside: Mapping[str, Way],
        ours: Mapping[str, tuple[Way, Goals]],
        wrong: tuple[int, int] | dict[str, tuple[int, int]],
        rounds: int = 60,
        plain_name: str = "plain",
        times: float = 1,
        calls: int | None = None,
    ) -> list[Row]:
        """Everything in turns; the rows of ``ours`` have what they must reach, and the wrong values."""
        runs: dict[str, Way] = {plain_name: plain, **beside, **{way: run for way, (run, _) in ours.items()}}
        seconds, calls = times * self.seconds, calls or self.calls
        found = ratios(runs, rounds=rounds, repeat=calls, wait=self.wait, seconds=seconds, patience=5)
        judged_beside = wrong if isinstance(wrong, dict) else dict.fromkeys(ours, wrong)
        rows = []
        for way, ratio in found.items():
            goals = ours[way][1] if way in ours else (None, None)
            counts = judged_beside.get(way, (None, None))
            note = f"{ratio.seconds * 1e3:.2f} ms" if way == plain_name else ""
            rows.append(Row(work, way, ratio.median, *goals, *counts, note=note, low=ratio.low, high=ratio.high))
        return rows

    def bare(self, model: nn.Module, names: list[str], run: Run, keep: Callable[[Tensor], Tensor]) -> Run:
        def with_hooks() -> None:
            with Bare(model, names, keep):
                run()

        return with_hooks

    def copy_alone(self, model: nn.Module, names: list[str], run: Run) -> Run:
        """The values again and again into the same pinned memory: what no tool can be faster than."""
        with Bare(model, names) as bare:
            run()
        values = [leaf for calls in bare.store.values() for call in calls for leaf in call]
        pin = self.sizes.device == "cuda"
        buffers = [torch.empty(value.shape, dtype=value.dtype, pin_memory=pin) for value in values]

        def copies() -> None:
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value, non_blocking=True)

        return copies

    def side_stream(self, model: nn.Module, names: list[str], run: Run) -> Run:
        """Bare hooks that copy on a stream of their own, into memory that is there: none comes before it is made."""
        if self.sizes.device != "cuda":
            return run
        side, made, buffers = torch.cuda.Stream(), torch.cuda.Event(), dict[str, Tensor]()

        def copies() -> None:
            handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
            run()
            for handle in handles:
                handle.remove()

        def hook(name: str) -> Callable[..., None]:
            def copy(module: nn.Module, args: Any, output: Any) -> None:
                value = leaves(output)[0]
                if name not in buffers:
                    buffers[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                made.record()
                side.wait_event(made)
                with torch.cuda.stream(side):
                    buffers[name].copy_(value, non_blocking=True)

            return copy

        return copies


def session(model: nn.Module, run: Run, *selectors: Any, **options: Any) -> Run:
    """A session for each call."""

    def captured() -> None:
        with th.capture(model, *selectors, **options):
            run()

    return captured


def stages_on_device(bench: Bench) -> Iterator[Row]:
    model, x = resnet50(bench.sizes)
    run = lambda: model(x)  # noqa: E731
    wrong = judged(model, STAGES, th.capture(model, STAGES), run)
    ours = {"session per call": (session(model, run, STAGES), (1.03, 1.01)), **prepared(model, run, STAGES)}
    beside = {"bare hooks, clone": bench.bare(model, STAGES, run, clone)}
    yield from bench.rows(f"ResNet-50 b{len(x)}, six stages kept on the GPU", run, beside, ours, wrong)


def prepared(model: nn.Module, run: Run, *selectors: Any, **options: Any) -> dict[str, tuple[Way, Goals]]:
    """A session that is made once and opened for each call, where sessions can be."""
    again = th.capture(model, *selectors, **options)

    def reopened() -> None:
        with again:
            run()

    try:
        reopened()
        reopened()
    except th.errors.SessionError as error:
        print(f"  (prepared sessions: {error})")
        return {}
    return {"prepared session, reopened": (reopened, (None, None))}


def stages_to_host(bench: Bench) -> Iterator[Row]:
    model, x = resnet50(bench.sizes)
    run = lambda: model(x)  # noqa: E731
    wrong = judged(model, STAGES, th.capture(model, STAGES, device="cpu"), run)
    way, ours = "session per call, device='cpu'", session(model, run, STAGES, device="cpu")
    before: list[th.Recording] = []

    def one_behind() -> None:
        with th.capture(model, STAGES, device="cpu") as rec:
            run()
        before.append(rec)
        if len(before) > 1:
            before.pop(0)[STAGES[-1]]

    side = {"bare hooks, side stream": bench.side_stream(model, STAGES, run)}
    beside = {
        "pinned copy alone": bench.copy_alone(model, STAGES, run),
        **side,
        "bare hooks, .cpu()": bench.bare(model, STAGES, run, to_host),
    }
    ways = {way: (ours, (1.28, 1.23)), "each read when the next one has run": (one_behind, (None, None))}
    work = f"ResNet-50 b{len(x)}, six stages to the host"
    yield from bench.rows(f"{work}, four batches in a row", run, beside, ways, wrong, calls=4)
    # The bus stands still until the first stage is there: alone, no call can be near to the copies alone.
    work = f"{work}, each batch waited for"
    yield from bench.rows(work, run, side, {way: (ours, (None, None))}, wrong, times=0.5, calls=1)


def gpt_blocks_to_host(bench: Bench) -> Iterator[Row]:
    model, inputs = gpt2_medium(bench.sizes)
    names, run = blocks(bench), lambda: model(**inputs)
    wrong = judged(model, names, th.capture(model, names, device="cpu"), run)
    ours = {"session per call, device='cpu'": (session(model, run, names, device="cpu"), (1.12, 1.05))}
    beside = {
        "pinned copy alone": bench.copy_alone(model, names, run),
        "bare hooks, side stream": bench.side_stream(model, names, run),
        "bare hooks, .cpu()": bench.bare(model, names, run, to_host),
    }
    yield from bench.rows("GPT-2 medium bf16 8x512, 24 blocks to the host", run, beside, ours, wrong)


def gpt_blocks_on_device(bench: Bench) -> Iterator[Row]:
    model, inputs = gpt2_medium(bench.sizes)
    names, run = blocks(bench), lambda: model(**inputs)
    wrong = judged(model, names, th.capture(model, names), run)
    ours: dict[str, tuple[Way, Goals]] = {"session per call": (session(model, run, names), (None, None))}
    beside = {"bare hooks, clone": bench.bare(model, names, run, clone)}
    yield from bench.rows("GPT-2 medium bf16 8x512, 24 blocks kept on the GPU", run, beside, ours, wrong)


def blocks(bench: Bench) -> list[str]:
    return [f"transformer.h.{number}" for number in range(bench.sizes.gpt_blocks)]


def gpt_all_modules(bench: Bench) -> Iterator[Row]:
    model, inputs = gpt2_medium(bench.sizes)
    run = lambda: model(**inputs)  # noqa: E731
    names = [name for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleList)]
    # Attention by one fused function leaves its dropout out, which is said at each exit.
    idle = {"exclude": "**.attn_dropout"}
    names = called(model, names, run)
    wrong = judged(model, names, th.capture(model, "**", **idle), run)
    ours: dict[str, tuple[Way, Goals]] = {"session per call": (session(model, run, "**", **idle), (1.35, 1.2))}
    ours |= prepared(model, run, names)
    ours["session held"] = (Held(lambda: th.capture(model, names, max_records=1), run), (1.35, 1.2))
    beside: dict[str, Way] = {
        "hooks that do nothing, held": Held(lambda: nothing(model, names), run),
        "bare hooks, clone": bench.bare(model, names, run, clone),
    }
    yield from bench.rows("GPT-2 medium, all modules kept on the GPU", run, beside, ours, wrong)


def called(model: nn.Module, names: list[str], run: Run) -> list[str]:
    """Those of the modules that run, and return tensors."""
    with Bare(model, names) as bare:
        run()
    return [name for name, calls in bare.store.items() if any(calls)]


def gpt_one_token(bench: Bench) -> Iterator[Row]:
    model, inputs = gpt2_medium(bench.sizes)
    inputs["input_ids"] = inputs["input_ids"][:1, :1]
    names, run = blocks(bench), lambda: model(**inputs)
    wrong = judged(model, names, th.capture(model, names), run)
    ours: dict[str, tuple[Way, Goals]] = {"session per call": (session(model, run, names), (1.15, 1.1))}
    ours |= prepared(model, run, names)
    ours["session held"] = (Held(lambda: th.capture(model, names, max_records=1), run), (1.06, 1.04))
    # Hooks that stay would keep every call: what is kept is the newest.
    beside: dict[str, Way] = {
        "hooks that do nothing, held": Held(lambda: nothing(model, names), run),
        "bare hooks, clone, put on and taken off": bench.bare(model, names, run, clone),
        "bare hooks, clone, held": Held(lambda: Newest(model, names), run),
    }
    yield from bench.rows("GPT-2 medium, one token, 24 blocks", run, beside, ours, wrong, rounds=300, times=3)


def gpt_attention(bench: Bench) -> Iterator[Row]:
    model, inputs = gpt2_medium(bench.sizes)
    run = lambda: model(**inputs)  # noqa: E731
    selector = "transformer.h.*.attn/scaled_dot_product_attention"
    truth: dict[str, list[list[Tensor]]] = {}
    handles = []
    for name in blocks(bench):  # what goes into the projection is what attention returned, its heads put side by side
        calls = truth.setdefault(f"{name}.attn/scaled_dot_product_attention", [])
        projection = model.get_submodule(f"{name}.attn.c_proj")
        handles.append(
            projection.register_forward_pre_hook(lambda m, args, calls=calls: calls.append([clone(args[0])]))
        )
    with th.capture(model, selector) as rec:
        run()
    wrong = count_wrong(lambda site: [v.transpose(1, 2).flatten(2) for v in rec.all(site)], truth)
    for handle in handles:
        handle.remove()
    ours: dict[str, tuple[Way, Goals]] = {
        "session per call": (session(model, run, selector), (1.3, 1.1)),
        "session held": (Held(lambda: th.capture(model, selector, max_records=1), run), (None, None)),
    }
    work = "GPT-2 medium, h.*.attn/scaled_dot_product_attention"
    yield from bench.rows(work, run, {}, ours, wrong)


def gpt_guard(bench: Bench) -> Iterator[Row]:
    model, inputs = gpt2_medium(bench.sizes)
    run = lambda: model(**inputs)  # noqa: E731
    wrong = guard_is_wrong(bench), 2

    def per_call() -> None:
        with th.guard(model):
            run()

    ours: dict[str, tuple[Way, Goals]] = {
        # What a model may change of itself is copied in its passes 1, 2, 4, 8 and so on: of many passes, in hardly any.
        "th.guard, open": (Held(lambda: th.guard(model), run, before=4), (1.8, 1.3)),
        "th.guard, opened for each call": (per_call, (None, None)),
    }
    yield from bench.rows("GPT-2 medium, th.guard", run, {}, ours, wrong)


def guard_is_wrong(bench: Bench) -> int:
    """Of two questions: nothing is found where all is well, and an overflow in the middle is found where it is made."""
    model, inputs = gpt2_medium(bench.sizes)
    with th.guard(model, action="record") as guard:
        model(**inputs)
    wrong = int(bool(guard.findings))
    layer = f"{blocks(bench)[bench.sizes.gpt_blocks // 2]}.mlp.c_fc"
    with torch.no_grad():
        model.get_submodule(layer).weight.fill_(3e38)
    with th.guard(model, action="record") as guard:
        model(**inputs)
    return wrong + int(not (guard.findings and str(guard.findings[0].site).startswith(layer)))


def training_watched(bench: Bench) -> Iterator[Row]:
    warnings.simplefilter("ignore", th.errors.TrainingWarning)  # random weights train badly
    wrong = watch_is_wrong(bench)
    ours: dict[str, tuple[Way, Goals]] = {}
    ten = range(2 if bench.sizes.tiny else 10)

    def steps(step: Run) -> Run:
        return lambda: [step() for _ in ten]

    _, plain = trainer(bench.sizes)
    with ExitStack() as stack:
        for every, goals in ((1, (1.4, 1.15)), (10, (1.05, 1.02))):
            model, step = trainer(bench.sizes)
            stack.enter_context(th.watch(model, every=every))
            ours[f"th.watch(every={every})"] = (steps(step), goals)
        work = "ResNet-50 training step, ten at a time"
        yield from bench.rows(work, steps(plain), {}, ours, wrong, rounds=10, calls=1)


def watch_is_wrong(bench: Bench) -> tuple[int, int]:
    """Mean, extremes and norm of every layer's output, beside those of the clones of bare hooks in the same step."""
    model, step = trainer(bench.sizes)
    names = [name for name, module in model.named_modules() if name]
    with Bare(model, called(model, names, step)) as bare:
        with th.watch(model, every=1) as watch:
            step()
        snapshot = watch.history[-1].sites
    wrong = total = 0
    for name, calls in bare.store.items():
        values = torch.cat([call[0].flatten() for call in calls if call]).double()
        true = {"mean": values.mean(), "min": values.min(), "max": values.max(), "norm": values.norm()}
        for statistic, number in true.items():
            total += 1
            reach = float(values.abs().max())
            limit = 1e-4 * (float(number) if statistic == "norm" else reach) + 1e-9
            wrong += not abs(snapshot[name][statistic] - float(number)) <= limit
    return wrong, total


def one_edit(bench: Bench) -> Iterator[Row]:
    model, inputs = gpt2_medium(bench.sizes)
    site = blocks(bench)[bench.sizes.gpt_blocks // 2]
    run = lambda: model(**inputs)  # noqa: E731
    with Bare(model, [site]) as bare, torch.no_grad():
        output: list[Any] = []
        handle = model.get_submodule(site).register_forward_hook(lambda m, a, o: output.append(o))
        run()
        handle.remove()
    vector = torch.randn_like(bare.store[site][0][0][0, 0])
    alone = isinstance(output[0], Tensor)
    change = edits.add(vector) if alone else edits.at(0, edits.add(vector))

    def by_hand() -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return output + vector if alone else (output[0] + vector, *output[1:])

        handle = model.get_submodule(site).register_forward_hook(hook)
        result = run()
        handle.remove()
        return result

    def edited() -> Any:
        with th.edit(model, {site: change}):
            return run()

    wrong = int(not same(edited().logits, by_hand().logits)), 1
    ours: dict[str, tuple[Way, Goals]] = {
        "th.edit for each call": (edited, (1.02, 1.01)),
        "th.edit, open": (Held(lambda: th.edit(model, {site: change}), run), (None, None)),
    }
    work = "GPT-2 medium, one edit on one block"
    yield from bench.rows(work, run, {"bare hook": by_hand}, ours, wrong, rounds=200, times=2)


def early_stop(bench: Bench) -> Iterator[Row]:
    model, x = resnet50(bench.sizes)
    truncated = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool, model.layer1)

    def ours() -> Any:
        return th.run(model, x, capture="layer1", stop=True)[1]["layer1"]

    wrong = int(not same(ours(), truncated(x))), 1
    ways: dict[str, tuple[Way, Goals]] = {"th.run(stop=True)": (ours, (1.05, 1.02))}
    ways |= prepared(model, lambda: model(x), "layer1", stop=True)
    plain = "truncated nn.Sequential"
    yield from bench.rows("ResNet-50, early stop at layer1", lambda: truncated(x), {}, ways, wrong, 100, plain)


def avgpool_to_disk(bench: Bench) -> Iterator[Row]:
    yield from resnet_to_disk(bench, "avgpool", 4, (0.93, 0.97))


def layer4_to_disk(bench: Bench) -> Iterator[Row]:
    yield from resnet_to_disk(bench, "layer4", 1, (0.85, 0.95))


def resnet_to_disk(bench: Bench, site: str, times: int, goals: tuple[float, float]) -> Iterator[Row]:
    model, x = resnet50(bench.sizes)
    # Pinned, so that the forward passes are as fast as they can be; random numbers are made faster on the device.
    count, pin = times * bench.sizes.rows, bench.sizes.device == "cuda"
    rows = torch.empty((count, *x.shape[1:]), pin_memory=pin)
    for low in range(0, count, len(x)):
        rows[low : low + len(x)].copy_(torch.randn_like(x))
    yield from to_disk(f"ResNet-50, {site} to disk", model, site, rows, len(x), bench.sizes, bench.turns, goals)


def compiled(bench: Bench) -> Iterator[Row]:
    yield from compiled_in(bench, "default", {})


def cuda_graphs(bench: Bench) -> Iterator[Row]:
    yield from compiled_in(bench, "CUDA graphs", {"mode": "reduce-overhead"})


def compiled_in(bench: Bench, name: str, options: dict[str, Any]) -> Iterator[Row]:
    if bench.sizes.tiny:
        options = {"backend": "eager"}
    torch._dynamo.reset()
    model, x = resnet50(bench.sizes)
    names = STAGES[2:]
    with Bare(model, names) as bare:
        output = model(x)
    twin, _ = resnet50(bench.sizes)
    plain = torch.compile(model, fullgraph=True, **options)
    hooked = th.FeatureLayers(twin, names, attach=True)
    hooked.compile(fullgraph=True, **options)
    for _ in range(3):  # the first calls compile and record
        hooked(x)
        plain(x)
    features, found = hooked(x)
    hooked(torch.zeros_like(x))  # a replay must not overwrite what was returned
    wrong, total = count_wrong(lambda site: [features[site]], bare.store, 2e-2)
    wrong += not same(found, output, 2e-2)
    ours: dict[str, tuple[Way, Goals]] = {"FeatureLayers(attach=True)": (lambda: hooked(x), (1.05, 1.02))}
    work = f"ResNet-50 b{len(x)}, four stages, compiled, {name}"
    yield from bench.rows(work, lambda: plain(x), {}, ours, (wrong, total + 1), plain_name="compiled model")


def big_decoder(bench: Bench) -> Iterator[Row]:
    sizes = bench.sizes
    model = llama(sizes)
    count = sum(parameter.numel() for parameter in model.parameters())
    ids = torch.randint(0, 32_000, sizes.big_tokens, device=sizes.device)
    names = [f"layers.{number}" for number in range(sizes.big_blocks)]
    run = lambda: model(ids, use_cache=False)  # noqa: E731
    ours: dict[str, tuple[Way, Goals]] = {}
    wrong: dict[str, tuple[int, int]] = {}
    for way, device in (("kept on the GPU, session per call", None), ("device='cpu', session per call", "cpu")):
        ours[way] = (session(model, run, names, device=device), (1.01, 1.01))
        wrong[way] = judged(model, names, th.capture(model, names, device=device), run)
    beside = {
        "bare hooks, clone": bench.bare(model, names, run, clone),
        "bare hooks, .cpu()": bench.bare(model, names, run, to_host),
    }
    work = f"Llama of {count / 1e9:.1f} billion parameters, 8x1024 tokens, {len(names)} blocks"
    yield from bench.rows(work, run, beside, ours, wrong, rounds=40, times=4, calls=1)
    rows = torch.randint(0, 32_000, (sizes.big_rows, sizes.big_tokens[1]))
    # The stopped pass needs no cache either.
    model.config.use_cache = False
    work = f"The same, block {sizes.big_block} of {rows.numel():,} tokens to disk"
    site = f"layers.{sizes.big_block}"
    yield from to_disk(work, model, site, rows, sizes.big_tokens[0], sizes, bench.turns, (0.93, 0.97))


WORK: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "stages-device": stages_on_device,
    "stages-host": stages_to_host,
    "blocks-device": gpt_blocks_on_device,
    "blocks-host": gpt_blocks_to_host,
    "all-modules": gpt_all_modules,
    "one-token": gpt_one_token,
    "attention": gpt_attention,
    "guard": gpt_guard,
    "watch": training_watched,
    "edit": one_edit,
    "early-stop": early_stop,
    "avgpool-disk": avgpool_to_disk,
    "layer4-disk": layer4_to_disk,
    "compiled": compiled,
    "cuda-graphs": cuda_graphs,
    "llama": big_decoder,
}


def forget_others() -> None:
    """Let the collector pass over what other work has left: a compiler's half a million objects take it 0.3 s."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here too, after each piece of work")
    parser.add_argument("--only", nargs="+", choices=list(WORK), metavar="NAME", help=", ".join(WORK))
    parser.add_argument("--seconds", type=float, default=8.0, help="for the timing of each piece of work, about")
    parser.add_argument("--calls", type=int, default=1, help="in each turn, before the device is waited for")
    parser.add_argument("--minutes", type=float, default=7.5, help="begin nothing after so long")
    parser.add_argument("--tiny", action="store_true", help="small models, on whatever is there: numbers mean nothing")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        sys.exit("there is no CUDA device here: --tiny tries the program without one.")
    bench = Bench(Sizes(device, options.tiny), options.seconds, options.calls)
    report = Report("On a GPU", options.json)
    begun = time.perf_counter()
    for name, work in WORK.items():
        if options.only and name not in options.only:
            continue
        if time.perf_counter() - begun > 60 * options.minutes:
            report.add(Row(name, "not run", None, note="the time was up"))
            continue
        started = time.perf_counter()
        forget_others()
        try:
            # Training needs gradients; everything else runs as one would run it for its values.
            with torch.set_grad_enabled(work is training_watched):
                for row in work(bench):
                    report.add(row)
        except Exception as error:  # one piece of work that fails must not take the others with it
            traceback.print_exc()
            report.add(Row(name, "failed", None, note=f"{type(error).__name__}: {error}"[:200]))
        if device == "cuda":
            torch.cuda.empty_cache()
        print(f"  ({time.perf_counter() - started:.0f} s)", flush=True)
    report.close()
    print(f"{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
