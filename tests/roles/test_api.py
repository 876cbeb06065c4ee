"""Standard names as selectors: everywhere, judged by bare hooks; refused where nothing shows them to be right."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th
from tests.language_models import checkpointed
from tests.roles_models import build
from torchhook import edits, transforms
from torchhook.errors import MissingRecordError, SelectorError


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return build("gpt2")


IDS = torch.tensor([[5, 9, 33, 21, 60, 7], [8, 2, 13, 44, 50, 31]])


class Block(nn.Module):
    """A block by hand: attention and a feed-forward part, one after the other."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attended(x)
        return x + self.down(torch.relu(self.up(self.n2(x))))


# -- found without a line per architecture ---------------------------------------------------------


def test_a_model_of_ones_own_has_names_too() -> None:
    model = nn.Sequential(Block(), Block())
    roles = th.roles(model, torch.randn(2, 5, 8))
    assert roles["@attn_out.1"] == "1.out"
    assert roles["mlp_out.0"] == "0.down"
    assert roles["@resid_mid.1"] == "1/add(0)"
    assert roles["@z.0"] == "0.out:input"


def test_projections_that_start_at_zero_are_told_apart() -> None:
    """By value, everything that is added would be everything else."""
    model = nn.Sequential(Block(), Block())
    for block in model:
        for layer in (block.out, block.down):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    roles = th.roles(model, torch.randn(2, 5, 8))
    assert (roles["attn_out.0"], roles["mlp_out.0"]) == ("0.out", "0.down")


def test_the_model_and_the_process_are_left_as_they_were(gpt2: Any) -> None:
    model = copy.deepcopy(gpt2).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    state = torch.get_rng_state()
    th.roles(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_names_are_right_while_training(gpt2: Any) -> None:
    """With dropout, what a projection makes is not what is added."""
    model = copy.deepcopy(gpt2).train()
    with th.capture(model, "@resid_*.1", "@attn_out.1", "@mlp_out.1") as rec:
        model(IDS)
    assert torch.equal(rec["@resid_pre.1"] + rec["@attn_out.1"], rec["@resid_mid.1"])
    assert torch.equal(rec["@resid_mid.1"] + rec["@mlp_out.1"], rec["@resid_post.1"])


# -- refused -----------------------------------------------------------------------------------------


class _Activated(nn.Module):
    """Looks like post-norm, and is a rectified sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.relu = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.b(torch.tanh(self.a(x))))


class _TokenMixer(nn.Module):
    """Two products and no attention, along the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x.transpose(1, 2)))).transpose(1, 2)


class _Gated(Block):
    """Something else beside attention, added to it before it joins the stream."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.attended(x) + self.down.weight[0, :8] * x)


class _Scaled(Block):
    """The stream itself is scaled on its way."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.9 * x + self.attended(x)


class _Copied(Block):
    """What the block returns is not what the next one takes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone() * 1.0)


@pytest.mark.parametrize(
    ("block", "refused"),
    [
        (_Activated, ["resid_pre.0", "resid_post.1", "mlp_out.0"]),
        (_TokenMixer, ["mlp_out.0", "attn_out.0", "resid_mid.1"]),
        (_Gated, ["mlp_out.0", "z.0"]),
        (_Scaled, ["resid_pre.0", "resid_post.0", "attn_out.0", "z.0"]),
        (_Copied, ["resid_pre.0", "resid_post.0", "attn_out.0"]),
    ],
)
def test_what_cannot_be_shown_is_refused_with_what_was_tried(block: type[nn.Module], refused: list[str]) -> None:
    model = nn.Sequential(block(), block())
    roles = th.roles(model, torch.randn(2, 5, 8))
    for name in refused:
        assert name not in roles
        with pytest.raises(SelectorError, match=f"@{name}"):
            th.capture(model, f"@{name}")
        with pytest.raises(SelectorError):
            roles[name]


def test_one_token_does_not_show_a_feed_forward_part(llama: Any) -> None:
    roles = th.roles(copy.deepcopy(llama), {"input_ids": torch.tensor([[3]])})
    assert "less than three tokens" in roles.refused["mlp_out.0"]


def test_a_fused_kernel_makes_no_pattern_and_the_error_says_what_does(llama: Any) -> None:
    with pytest.raises(SelectorError, match=r"attn_implementation='eager', or take th\.attention"):
        th.capture(llama, "@pattern.1")


def test_a_wrong_name_has_the_closest_ones(llama: Any) -> None:
    with pytest.raises(SelectorError, match=r"'@resid_post\.1'"):
        th.capture(llama, "@resid_pst.1")
    with pytest.raises(SelectorError, match=r"stands for no site.*@resid_post\.\*"):
        th.capture(llama, "@resid_pots.*")
    with pytest.raises(SelectorError, match="means one value"):
        th.capture(llama, "@resid_post.1:input")


def test_a_model_that_does_not_say_how_it_is_called_asks_for_inputs() -> None:
    with pytest.raises(SelectorError, match=r"th.roles\(model, inputs\) first"):
        th.capture(nn.Sequential(Block(), Block()), "@resid_post.*")


# -- a table of one's own -----------------------------------------------------------------------------


def test_a_users_own_table_is_taken_as_it_is() -> None:
    model = nn.Sequential(Block(), Block())
    th.roles(model, table={"@resid_post.0": "0", "middle": "1.up"})
    with th.capture(model, "@middle", "@resid_post.*") as rec:
        model(torch.randn(2, 5, 8))
    assert rec["@middle"].shape == (2, 5, 16)
    with pytest.raises(SelectorError, match="one output or input"):
        th.roles(model, table={"x": "*"})
    with pytest.raises(SelectorError, match="nowhere"):
        th.roles(model, table={"x": "nowhere"})


def test_a_users_own_table_overrules_what_is_found() -> None:
    model = nn.Sequential(Block(), Block())
    roles = th.roles(model, torch.randn(2, 5, 8), table={"mlp_out.0": "0.up"})
    assert (roles["mlp_out.0"], roles["mlp_out.1"]) == ("0.up", "1.down")


# -- selectors everywhere -------------------------------------------------------------------------------


def test_a_glob_of_names_captures_and_reads_by_them(llama: Any) -> None:
    with torch.no_grad(), th.capture(llama, "@resid_post.*") as rec:
        output = llama(IDS, output_hidden_states=True)
    assert rec.keys() == ["@resid_post.0", "@resid_post.1", "@resid_post.2"]
    assert torch.equal(rec["@resid_post.1"], output.hidden_states[2])
    assert torch.equal(rec["model.layers.1"], rec["@resid_post.1"])


def test_a_recording_by_addresses_is_read_by_names_too(llama: Any) -> None:
    th.roles(llama)
    _, rec = th.run(llama, IDS, capture="model.layers.*")
    assert torch.equal(rec["@resid_post.1"], rec["model.layers.1"])
    with pytest.raises(MissingRecordError):
        rec["@z.1"]


def test_a_name_gives_the_tensor_where_a_block_returns_a_tuple() -> None:
    model = build("gpt_neo")
    _, rec = th.run(model, IDS, capture="@resid_post.*")
    assert isinstance(rec["@resid_post.1"], Tensor)


def test_editing_the_middle_of_a_block_is_adding_to_what_attention_adds(llama: Any) -> None:
    bump = torch.randn(32)
    handle = llama.model.layers[1].self_attn.o_proj.register_forward_hook(lambda m, a, out: out + bump)
    with torch.no_grad():
        expected = llama(IDS).logits
        handle.remove()
        with th.edit(llama, {"@resid_mid.1": edits.add(bump)}):
            found = llama(IDS).logits
    torch.testing.assert_close(found, expected)


def test_gradients_have_names_too(llama: Any) -> None:
    with th.capture(llama, "@resid_post.0:grad", "@resid_mid.1:grad", "@attn_out.1:grad", "@z.1:grad") as rec:
        output = llama(IDS, output_hidden_states=True)
        output.hidden_states[1].retain_grad()
        output.logits.square().sum().backward()
    llama.zero_grad()
    torch.testing.assert_close(rec["@resid_post.0:grad"], output.hidden_states[1].grad)
    torch.testing.assert_close(rec["@resid_mid.1:grad"], rec["@attn_out.1:grad"])
    torch.testing.assert_close(
        rec["@z.1:grad"], rec["@attn_out.1:grad"] @ llama.model.layers[1].self_attn.o_proj.weight
    )


def test_every_step_of_a_generation_is_recorded(llama: Any) -> None:
    with th.capture(llama, "@resid_mid.1", "@resid_pre.0", "@q.2") as rec:
        ids = llama.generate(IDS, max_new_tokens=3, do_sample=False)
    joined = torch.cat(rec.all("@resid_mid.1"), dim=1)
    whole: list[Tensor] = []
    norm = llama.model.layers[1].post_attention_layernorm
    handle = norm.register_forward_pre_hook(lambda module, args: whole.append(args[0].clone()))
    with torch.no_grad():
        llama(ids[:, :-1], use_cache=False)
    handle.remove()
    torch.testing.assert_close(joined, whole[0], rtol=1e-4, atol=1e-5)
    assert [value.shape[1] for value in rec.all("@resid_pre.0")] == [6, 1, 1]


def test_sweeps_transforms_stops_and_patches_take_names(llama: Any) -> None:
    clean, corrupted = {"input_ids": IDS[:1]}, {"input_ids": IDS[1:]}
    found = th.sweep(llama, clean, corrupted, lambda o: o.logits[0, -1, 3], sites="@resid_post.*", progress=False)
    assert found.sites == ["@resid_post.0", "@resid_post.1", "@resid_post.2"]
    assert found["@resid_post.2", 5].item() == pytest.approx(found.clean, rel=1e-4)
    _, rec = th.run(llama, IDS, capture="@resid_*.0", transform=transforms.tokens("last"), stop=True)
    assert rec["@resid_mid.0"].shape == (2, 32)
    _, kept = th.run(llama, IDS, capture="@resid_post.2")
    output, _ = th.run(llama, IDS.flip(0), edit={"@resid_post.2": edits.patch(kept)})
    torch.testing.assert_close(output.logits, llama(IDS).logits)


def test_two_architectures_are_compared_by_names(llama: Any, gpt2: Any) -> None:
    recordings = [th.run(model, IDS, capture="@resid_post.*")[1] for model in (llama, gpt2)]
    assert [row.site for row in th.diff(*recordings)] == ["@resid_post.0", "@resid_post.1", "@resid_post.2"]


def test_features_on_disk_have_names(llama: Any, tmp_path: Path) -> None:
    store = th.extract(llama, iter([{"input_ids": IDS}] * 2), ["@resid_post.1"], out=tmp_path / "f", progress=False)
    torch.testing.assert_close(
        torch.as_tensor(store["@resid_post.1"][:2]), th.run(llama, IDS, capture="@resid_post.1")[1]["@resid_post.1"]
    )


def test_a_saved_recording_is_read_by_names_without_its_model(llama: Any, tmp_path: Path) -> None:
    with th.capture(llama, "@resid_post.1", "@z.1", "@z.1:grad") as rec:
        llama(IDS).logits.sum().backward()
    llama.zero_grad()
    again = th.load(rec.save(tmp_path / "rec.safetensors"))
    assert again.keys() == rec.keys()
    assert all(torch.equal(again[name], rec[name]) for name in rec)
    assert torch.equal(copy.deepcopy(rec)["@z.1"], rec["@z.1"])


def test_a_table_prints_itself(gpt2: Any) -> None:
    text = str(th.roles(gpt2))
    assert "@resid_mid.0…2" in text
    assert "transformer.h.*/add(0)" in text
    assert "refused: @pattern.0…2" in text
    assert "@z.0…2" in th.roles(gpt2)._repr_html_()
    assert next(iter(th.roles(gpt2))) == "@embed"


def test_feature_layers_take_names_also_where_they_stay_attached(llama: Any) -> None:
    wanted = ["@resid_post.0", "@resid_pre.1"]  # one place with two names
    for attach in (False, True):
        features, output = th.FeatureLayers(llama, wanted, attach=attach)(IDS, output_hidden_states=True)
        assert all(torch.equal(features[name], output.hidden_states[1]) for name in wanted)
    with pytest.raises(SelectorError, match="whole values"):
        th.FeatureLayers(llama, ["@resid_mid.1"], attach=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_repeats_the_edit_of_a_name_in_its_backward_pass(llama: Any, reentrant: bool) -> None:
    model = copy.deepcopy(llama).train()
    model.enable_input_require_grads()  # which reentrant checkpoints need
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            checkpointed(model, reentrant)
        with th.edit(model, {"@resid_mid.1": edits.scale(0.5)}), th.capture(model, "@resid_mid.1:grad") as rec:
            model(IDS).logits.square().sum().backward()
        found.append((rec["@resid_mid.1:grad"], model.model.layers[0].mlp.up_proj.weight.grad.clone()))
        model.zero_grad()
    for plain, repeated in zip(*found, strict=True):
        torch.testing.assert_close(plain, repeated)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_routers_are_the_scores_that_the_model_reports_and_experts_what_is_added(name: str) -> None:
    model: Any = build(name)
    with torch.no_grad(), th.capture(model, "@router.*", "@experts.*", "@mlp_out.*") as rec:
        output = model(IDS, output_router_logits=True)
    for i, scores in enumerate(output.router_logits):
        assert torch.equal(rec[f"@router.{i}"].reshape(scores.shape), scores)
        experts, total = rec[f"@experts.{i}"], rec[f"@mlp_out.{i}"]
        if name == "qwen2_moe":
            mlp = model.model.layers[i].mlp
            with torch.no_grad(), th.capture(model, f"model.layers.{i}.mlp:input") as inner:
                model(IDS)
                x = inner[f"model.layers.{i}.mlp:input"]
                shared = torch.sigmoid(mlp.shared_expert_gate(x)) * mlp.shared_expert(x)
            experts = experts.reshape(total.shape) + shared
        torch.testing.assert_close(experts.reshape(total.shape), total)


def test_the_router_of_deepseek_is_its_gate_and_sends_tokens_where_it_is_told() -> None:
    model: Any = build("deepseek_v3")
    layer = model.model.layers[1].mlp
    with torch.no_grad(), th.capture(model, "@router.1", "@experts.1", "model.layers.1.mlp:input", "@mlp_out.1") as rec:
        model(IDS)
        x = rec["model.layers.1.mlp:input"]
        torch.testing.assert_close(rec["@router.1"], x.flatten(0, 1) @ layer.gate.weight.T)
        shared = layer.shared_experts(x)
    torch.testing.assert_close(rec["@experts.1"].reshape(x.shape) + shared, rec["@mlp_out.1"])


# -- inside of other sessions --------------------------------------------------------------------------------------


def test_the_search_for_names_is_seen_by_no_session_that_is_open() -> None:
    model = build("llama")
    with (
        torch.no_grad(),
        th.capture(model, "model.layers.0", "model.layers.0.mlp/mul") as rec,
        th.watch(model) as watch,
    ):
        with th.attention(model) as maps, th.edit(model, {"@z.1": edits.only(edits.zero(), heads=1)}):
            model(IDS)
    assert len(rec.all("model.layers.0")) == len(rec.all("model.layers.0.mlp/mul")) == 1
    assert len(maps.all("model.layers.0.self_attn")) == 1
    assert (rec.elsewhere, rec.missing, [snapshot.step for snapshot in watch.history]) == ({}, {}, [0])


def test_a_session_that_stops_waits_for_a_call_of_its_own() -> None:
    model = build("llama")
    with torch.no_grad(), th.capture(model, "model.layers.0", stop=True) as outer, th.capture(model, "@z.0") as inner:
        model(IDS)
    assert outer["model.layers.0"].shape[:2] == IDS.shape
    assert inner["@z.0"].shape[:2] == IDS.shape


@pytest.mark.parametrize(
    "change",
    [
        {"model.layers.1": edits.scale(2)},
        {"model.layers.1.self_attn.o_proj": edits.zero()},
        {"model.layers.1.mlp#0": edits.zero()},
        {"model.layers.1.mlp": edits.only(edits.zero(), positions=5)},
    ],
    ids=str,
)
def test_names_belong_to_the_model_and_not_to_the_edits_around(change: dict[str, Any]) -> None:
    model, alone = build("llama"), build("llama")
    names = th.roles(alone)
    with th.edit(model, change), torch.no_grad():
        with th.capture(model, "@resid_post.1", "@attn_out.1", "@mlp_out.1") as rec:
            model(IDS)
    assert dict(th.roles(model)) == dict(names)
    with th.edit(alone, change), torch.no_grad(), th.capture(alone, "@resid_post.1") as expected:
        alone(IDS)
    assert torch.equal(rec["@resid_post.1"], expected["@resid_post.1"])


def test_a_lens_inside_of_its_own_capture_records_nothing_of_itself() -> None:
    model = build("llama")
    with torch.no_grad(), th.capture(model, "@resid_post.*") as rec:
        output = model(IDS)
        lens = th.lens(model, rec)
    assert len(rec.all("@resid_post.0")) == 1
    torch.testing.assert_close(lens[list(rec.keys())[-1]], output.logits, rtol=1e-4, atol=1e-4)


def test_names_of_ones_own_stand_beside_those_that_are_found() -> None:
    model = build("llama")
    found = th.roles(model, table={"@act.0": "model.layers.0.mlp.act_fn", "@embed": "model.norm"})
    assert found["@act.0"] == "model.layers.0.mlp.act_fn"
    assert found["@embed"] == "model.norm"
    with torch.no_grad(), th.capture(model, "@resid_post.1", "@act.0") as rec:
        model(IDS)
    assert rec["@resid_post.1"].shape[:2] == rec["@act.0"].shape[:2] == IDS.shape


def test_names_are_found_anew_when_a_model_attends_in_another_way() -> None:
    model = build("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(SelectorError, match="fused kernel"):
        th.capture(model, "@pattern.0")
    model.set_attn_implementation("eager")
    with torch.no_grad(), th.capture(model, "@pattern.0", "@q.0") as rec:
        model(IDS)
    torch.testing.assert_close(rec["@pattern.0"].sum(-1), torch.ones(rec["@pattern.0"].shape[:-1]))


def test_a_lens_without_logits_says_how_to_name_them() -> None:
    model = nn.Sequential(Block(), Block())
    th.roles(model, table={"@resid_post.0": "0", "@resid_post.1": "1"})
    _, rec = th.run(model, torch.randn(2, 3, 8), capture="@resid_post.*")
    with pytest.raises(SelectorError, match=r"where the logits are is not known.*table=\{'@logits'"):
        th.lens(model, rec, inputs=torch.randn(2, 3, 8))
