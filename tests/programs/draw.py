"""Programs drawn from a seed: classes whose forward is straight-line code over a handful of small tensors.

What is drawn is Python source, so that a counterexample can be read, shortened and run without this file. It defines
``Program``, a module, and ``inputs()``, what to call it with. Four names in it mean more to the judge than to torch:
``checkpoint``, ``detach``, ``no_grad`` with the tensors that are written to in the block, and ``frozen`` around what
may come out of one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.programs import moves
from tests.programs.moves import Move, Shape

_DEEPEST = 2  # classes in classes of the program
_LARGEST = 64  # elements: nothing is learnt from larger tensors


def draw(seed: int) -> str:
    """The source of a program."""
    dice = Dice(seed)
    shapes = [dice.choice([(3, 4), (2, 3, 4), (2, 4, 3), (1, 2, 4)]) for _ in range(dice.choice([1, 1, 1, 2]))]
    trained = [dice.maybe(0.5) for _ in shapes]
    book = Book()
    Class(dice, book, "Program", shapes, locked=[name for name, yes in zip("xyz", trained, strict=False) if yes])
    made = [f"torch.randn{s}{'.requires_grad_()' if yes else ''}" for s, yes in zip(shapes, trained, strict=True)]
    return "\n\n".join([*book.classes, f"def inputs():\n    return ({', '.join(made)},)\n"])


class Dice(random.Random):
    """Random numbers, and the ways they are used here."""

    def maybe(self, chance: float) -> bool:
        return self.random() < chance

    def weighted(self, table: dict[Any, float]) -> Any:
        return self.choices(list(table), list(table.values()))[0]


@dataclass
class Book:
    """The classes of a program, those that others are made of first."""

    classes: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))


@dataclass
class Module:
    """What a forward can call: an attribute, what it takes, and how what it returns is taken apart."""

    attribute: str
    takes: list[Shape]
    gives: dict[str, Shape]
    keyword: str = "x"
    keeps: dict[str, Shape] = field(default_factory=dict)
    """Shapes of tensors that it leaves in attributes."""


class Class:
    """Writes one class: its modules and parameters, its steps, and what it returns."""

    def __init__(
        self, dice: Dice, book: Book, name: str, shapes: list[Shape], depth: int = 0, locked: list[str] | None = None
    ) -> None:
        self.dice, self.book, self.depth = dice, book, depth
        self.made: list[str] = []
        self.modules: list[Module] = []
        self.keeps: dict[str, Shape] = {}
        self.lines: list[str] = []
        self.margin = 0
        self.numbers = count(1)
        self.values: dict[str, Shape] = dict(zip("xyz", shapes, strict=False))
        self.locked = set(locked or ())
        arguments = ", ".join(self.values)
        if depth == 0 and dice.maybe(0.7):
            self.open_with_a_layer()
        self.steps(dice.randint(3, 9) if depth == 0 else dice.randint(1, 4))
        self.gives, result = self.result()
        self.say(f"return {result}")
        init = ["super().__init__()", *self.made]
        text = [f"class {name}(nn.Module):", "    def __init__(self):", *(f"        {line}" for line in init), ""]
        text += [f"    def forward(self, {arguments}):", *(f"        {line}" for line in self.lines)]
        book.classes.append("\n".join(text) + "\n")

    # -- writing ------------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        self.lines.append("    " * self.margin + line)

    def name(self, kind: str = "h") -> str:
        return f"{kind}{next(self.numbers)}"

    def new(self, expression: str, shape: Shape) -> str:
        """A step that gives a value a name."""
        name = self.name()
        self.say(f"{name} = {expression}")
        self.values[name] = shape
        return name

    def some(self, shape: Shape | None = None, writable: bool = False) -> str | None:
        """A value, rather a late one."""
        found = [
            name
            for name, its in self.values.items()
            if (shape is None or its == shape) and not (writable and name in self.locked)
        ]
        if not found:
            return None
        return found[max(self.dice.randrange(len(found)), self.dice.randrange(len(found)))]

    def filled(self, text: str, value: str) -> str:
        other = self.some(self.values[value])
        number = self.dice.choice([-1.5, -0.5, 0.5, 0.7, 1.3, 2.0])
        return text.replace("{h}", value).replace("{g}", str(other)).replace("{c}", str(number))

    def attribute(self, kind: str, expression: str) -> str:
        name = self.name(kind)
        self.made.append(f"self.{name} = {expression}")
        return name

    def parameter(self, shape: Shape) -> str:
        return "self." + self.attribute("w", f"nn.Parameter(torch.randn{shape})")

    @contextlib.contextmanager
    def indented(self) -> Iterator[None]:
        self.margin += 1
        yield
        self.margin -= 1

    # -- steps ----------------------------------------------------------------------------------------

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.dice.weighted(STEPS)(self)

    def open_with_a_layer(self) -> None:
        """All values need a gradient then, and can be written to."""
        for name, shape in self.values.items():
            layer = self.attribute("m", f"nn.Linear({shape[-1]}, {shape[-1]})")
            self.modules.append(Module(layer, [shape], {"": shape}, "input"))
            self.say(f"{name} = self.{layer}({name})")
        self.locked.clear()

    def call_a_module(self) -> None:
        module = self.module()
        self.call(module, f"self.{module.attribute}")

    def call_in_a_checkpoint(self) -> None:
        module = self.module(part=0.7)
        self.call(module, f"self.{module.attribute}", checkpointed=True)

    def call_a_function_in_a_checkpoint(self) -> None:
        """A function of its own, which sees its arguments and sometimes more."""
        if self.margin > 1:
            return
        outer, locked = self.values, self.locked
        taken = [name for name in (self.some(), *([self.some()] if self.dice.maybe(0.3) else [])) if name is not None]
        function, arguments = self.name("run"), [self.name("a") for _ in taken]
        self.say(f"def {function}({', '.join(arguments)}):")
        # What a reentrant checkpoint uses without being given it, torch differentiates on the side.
        sees_more, given = self.dice.maybe(0.1), {a: outer[t] for a, t in zip(arguments, taken, strict=True)}
        reentrant = not sees_more and self.dice.maybe(0.4)
        self.values = {**outer, **given} if sees_more else given
        with self.indented():
            self.steps(self.dice.randint(1, 3))
            found = self.some()
            assert found is not None
            self.say(f"return {found}")
        shape, self.values, self.locked = self.values[found], outer, locked
        self.new(f"checkpoint({function}, {', '.join(taken)}, use_reentrant={reentrant})", shape)

    def apply_a_function(self) -> None:
        self.move(moves.functions)

    def take_a_view(self) -> None:
        self.move(moves.views)

    def move(self, kind: Callable[[Shape], list[Move]]) -> None:
        value = self.some()
        if value is None:
            return
        text, shape = self.dice.choice(kind(self.values[value]))
        if _size(shape) <= _LARGEST:
            self.new(self.filled(text, value), shape)

    def take_several_views(self) -> None:
        value = self.some()
        found = moves.several(self.values[value]) if value is not None else []
        if found and value is not None:
            text, shapes = self.dice.choice(found)
            names = [self.name() for _ in shapes]
            self.say(f"{', '.join(names)} = {self.filled(text, value)}")
            self.values.update(zip(names, shapes, strict=True))

    def write(self) -> None:
        value = self.some(writable=True)
        if value is None:
            return
        text = self.filled(self.dice.choice(moves.writes(self.values[value])), value)
        if text.endswith("_()") and self.dice.maybe(0.2):
            self.new(text, self.values[value])
        else:
            self.say(text)

    def use_a_parameter(self) -> None:
        value = self.some()
        if value is not None:
            weight = self.parameter(self.values[value][-1:])
            self.new(f"{value} {self.dice.choice('+*')} {weight}", self.values[value])

    def detach(self) -> None:
        value = self.some()
        if value is not None:
            self.new(f"detach({value})", self.values[value])

    def compute_without_gradients(self) -> None:
        value = self.some()
        if value is None:
            return
        self.say("with no_grad():")
        with self.indented():
            if self.dice.maybe(0.5):
                module = self.module()
                self.call(module, f"self.{module.attribute}", frozen=True)
                self.say("pass")
            else:
                text, shape = self.dice.choice(moves.functions(self.values[value]) + moves.views(self.values[value]))
                self.new(f"frozen({self.filled(text, value)})", shape)

    def write_without_gradients(self) -> None:
        value = self.some(writable=True)
        if value is not None:
            self.say(f"with no_grad({value}):")
            with self.indented():
                self.say(self.filled(self.dice.choice(moves.writes(self.values[value])), value))

    def keep_in_an_attribute(self) -> None:
        value = self.some()
        if value is not None and self.margin == 0:
            name = self.name("kept")
            self.say(f"self.{name} = {value}")
            self.keeps[name] = self.values[value]

    # -- modules --------------------------------------------------------------------------------------

    def module(self, part: float = 0.3) -> Module:
        """One to call; mostly a new one."""
        known = [m for m in self.modules if all(shape in self.values.values() for shape in m.takes)]
        if known and self.dice.maybe(0.25):
            return self.dice.choice(known)
        value = self.some()
        assert value is not None
        shape = self.values[value]
        if self.depth < _DEEPEST and self.dice.maybe(part):
            module = self.part(shape)
        else:
            layer = moves.layer(self.dice, shape)
            module = Module(self.attribute("m", layer.text), [shape], layer.gives, layer.keyword)
        self.modules.append(module)
        return module

    def part(self, shape: Shape) -> Module:
        """A class of its own."""
        shapes = [shape]
        if self.dice.maybe(0.25):
            shapes.append(self.dice.choice(list(self.values.values())))
        name = f"Part{next(self.book.numbers)}"
        written = Class(self.dice, self.book, name, shapes, self.depth + 1)
        return Module(self.attribute("m", f"{name}()"), shapes, written.gives, keeps=written.keeps)

    def call(self, module: Module, function: str, checkpointed: bool = False, frozen: bool = False) -> None:
        arguments = [str(self.some(shape)) for shape in module.takes]
        if checkpointed:
            text = f"checkpoint({function}, {', '.join(arguments)}, use_reentrant={self.dice.maybe(0.4)})"
        else:
            if self.dice.maybe(0.1) and module.gives.keys() != {"[0]", "[1]"}:
                keyword = module.keyword if len(arguments) == 1 else "xyz"[len(arguments) - 1]
                shown = [*arguments[:-1], f"{keyword}={arguments[-1]}"]
            else:
                shown = arguments
            text = f"{function}({', '.join(shown)})"
        text = f"frozen({text})" if frozen else text
        self.take_apart(module, text, arguments[0])
        for name, shape in module.keeps.items():
            if self.dice.maybe(0.6) and not checkpointed:
                self.new(f"frozen(self.{module.attribute}.{name})", shape)

    def take_apart(self, module: Module, text: str, argument: str) -> None:
        if not module.gives or self.dice.maybe(0.05):
            self.say(text)
            return
        if list(module.gives) != [""]:
            result = self.name("r")
            self.say(f"{result} = {text}")
            for place, shape in module.gives.items():
                if self.dice.maybe(0.75):
                    self.new(result + place, shape)
            return
        shape = module.gives[""]
        if _size(shape) > _LARGEST:
            self.say(text)
        elif self.values[argument] == shape and argument not in self.locked and self.dice.maybe(0.3):
            self.say(f"{argument} = {text}")
        else:
            self.new(text, shape)

    # -- what is returned -----------------------------------------------------------------------------

    def result(self) -> tuple[dict[str, Shape], str]:
        """How to reach the tensors in what is returned, and the text of it."""
        kinds: dict[Any, float] = {
            self._tensor: 8,
            self._tuple: 3,
            self._dict: 2,
            self._nested: 1,
            self._twice: 1,
            self._with_a_view: 1,
            self._argument: 1,
            self._parameter: 0.7,
        }
        if self.depth == 0:
            kinds = {self._tensor: 2, self._tuple: 5, self._dict: 2, self._with_a_view: 1}
        else:
            kinds[self._nothing] = 1
        return self.dice.weighted(kinds)()

    def _late(self) -> str:
        found = self.some()
        assert found is not None
        return found

    def _tensor(self) -> tuple[dict[str, Shape], str]:
        value = self._late()
        return {"": self.values[value]}, value

    def _tuple(self) -> tuple[dict[str, Shape], str]:
        found = [self._late() for _ in range(self.dice.randint(2, 3))]
        return {f"[{i}]": self.values[v] for i, v in enumerate(found)}, f"({', '.join(found)})"

    def _dict(self) -> tuple[dict[str, Shape], str]:
        a, b = self._late(), self._late()
        return {"['a']": self.values[a], "['b']": self.values[b]}, f"{{'a': {a}, 'b': {b}}}"

    def _nested(self) -> tuple[dict[str, Shape], str]:
        a, b = self._late(), self._late()
        return {"[0]['a']": self.values[a], "[1][0]": self.values[b]}, f"({{'a': {a}}}, [{b}, None, 3])"

    def _twice(self) -> tuple[dict[str, Shape], str]:
        value = self._late()
        return {"[0]": self.values[value], "[1]": self.values[value]}, f"({value}, {value})"

    def _with_a_view(self) -> tuple[dict[str, Shape], str]:
        value = self._late()
        text, shape = self.dice.choice(moves.views(self.values[value]))
        return {"[0]": self.values[value], "[1]": shape}, f"({value}, {self.filled(text, value)})"

    def _argument(self) -> tuple[dict[str, Shape], str]:
        name = self.dice.choice([n for n in "xyz" if n in self.values])
        text, shape = self.dice.choice([Move("{h}", self.values[name]), *moves.views(self.values[name])])
        return {"": shape}, self.filled(text, name)

    def _parameter(self) -> tuple[dict[str, Shape], str]:
        shape = self.values[self._late()]
        weight = self.parameter(shape)
        text, shape = self.dice.choice([Move("{h}", shape), Move("{h}", shape), *moves.views(shape)])
        return {"": shape}, text.replace("{h}", weight)

    def _nothing(self) -> tuple[dict[str, Shape], str]:
        return {}, "None"


def _size(shape: Shape) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


STEPS: dict[Callable[[Class], None], float] = {
    Class.call_a_module: 10,
    Class.call_in_a_checkpoint: 1,
    Class.call_a_function_in_a_checkpoint: 1,
    Class.apply_a_function: 4,
    Class.take_a_view: 3,
    Class.take_several_views: 0.7,
    Class.write: 5,
    Class.use_a_parameter: 0.7,
    Class.detach: 0.4,
    Class.compute_without_gradients: 0.4,
    Class.write_without_gradients: 0.4,
    Class.keep_in_an_attribute: 0.7,
}
