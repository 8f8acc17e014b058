"""Chat templates in a sandbox: a template is a program written by the author of the model folder, and may ask for anything.

template -> parsed -> loops, texts and calls that are weighed -> rendered while work and time last

What a template makes is weighed while it runs, in this process: a rendering stays as fast as it was, and one that would
take all memory or never end stops with an error instead.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from typing import Any, cast

import jinja2
from jinja2 import nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

MAX_WORK = 64_000_000
"""Characters and items that one rendering may make."""
MAX_SECONDS = 20.0
"""That one rendering may take; a usual one takes less than a thousandth."""
MAX_SOURCE = 1 << 20
"""Characters of a template."""
_MOST_BITS = 4096
"""Of a whole number."""
_ITEM = 16
"""What an item of a list weighs, in characters."""
_ASKED = 24
"""What every loop, call and text weighs beside, so that their number is bounded too."""
_BETWEEN_LOOKS = 100_000
"""Work after which the clock is read again."""
_SHORT = 32
"""Characters of a text that is weighed with its loop."""
_WIDTH = re.compile(r"[0-9]{5,}|\*")
_LINEAR = frozenset({
    "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition", "startswith", "endswith",
    "upper", "lower", "title", "capitalize", "swapcase", "casefold", "find", "rfind", "index", "rindex", "count",
    "removeprefix", "removesuffix", "isdigit", "isalpha", "isspace", "isupper", "islower", "isnumeric", "isdecimal",
    "get", "items", "keys", "values", "copy", "trim", "length", "first", "last", "list", "default", "d", "select",
    "reject", "selectattr", "rejectattr", "map", "attr", "reverse", "min", "max", "unique", "sort", "int", "float",
    "abs", "round", "safe", "range", "namespace", "raise_exception", "strftime_now",
})  # fmt: skip
"""What makes no more than it is given, or is counted where it is used; looking at its arguments would take longer."""


_AT_ONCE = frozenset({"length", "count", "default", "d", "first", "last"})
"""Filters that take no time whatever they are given."""


class TemplateLimitError(jinja2.exceptions.TemplateRuntimeError):
    """A template asked for more than a rendering may take."""


class _Work:
    """What is left of the work and the time of one rendering."""

    __slots__ = ("deadline", "left", "look_again")

    def __init__(self) -> None:
        self.left = MAX_WORK
        self.look_again = MAX_WORK
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self, size: int) -> None:
        """Take this much work off, and a little for having asked."""
        self.left -= size + _ASKED
        if self.left < self.look_again:
            self._look()

    def _look(self) -> None:
        if self.left < 0:
            raise TemplateLimitError(f"the chat template makes more than {MAX_WORK:,} characters for one conversation")
        if time.monotonic() > self.deadline:
            raise TemplateLimitError(f"the chat template takes longer than {MAX_SECONDS:g} s for one conversation")
        self.look_again = max(0, self.left - _BETWEEN_LOOKS)

    def weigh(self, value: Any) -> int:
        """The size of a value as text, parts that occur twice counted twice; no further than what is left."""
        total, left = 0, [value]
        while left:
            one = left.pop()
            total += _ITEM + (len(one) if isinstance(one, str) else 0)
            if isinstance(one, Mapping):
                left += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple):
                left += one
            if total + len(left) > self.left:
                self.spend(total + len(left))
        return total


_work: ContextVar[_Work | None] = ContextVar("work", default=None)


def apply_template(owner: Any, messages: Any, **settings: Any) -> Any:
    """`owner.apply_chat_template(messages, ...)` within bounds; what is beyond raises `TemplateLimitError`.

    `owner` is a tokenizer or a processor of transformers. The text is the one it renders without bounds.
    """
    with _bounded():
        return owner.apply_chat_template(messages, **settings)


@contextmanager
def _bounded() -> Iterator[None]:
    token = _work.set(_Work())
    try:
        yield
    finally:
        _work.reset(token)


def _current() -> _Work:
    work = _work.get()
    return _Work() if work is None else work


class _Bounded(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, in which everything that can grow is weighed."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _generate(self, source: nodes.Template, *more: Any, **settings: Any) -> str:
        return str(super()._generate(_Weigher().visit(source), *more, **settings))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator whose result may be far larger than its operands."""
        work = _current()
        if operator == "+" and type(left) is str and type(right) is str:  # nearly all there is
            work.spend(len(left) + len(right))
            return left + right
        _foresee_operator(work, operator, left, right)
        found = super().call_binop(context, operator, left, right)
        work.spend(_shallow(found))
        return found

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A function, a macro, or a method of a text or a list."""
        work = _current()
        owner = getattr(called, "__self__", None)
        if isinstance(owner, str | bytes | list | tuple | dict):
            _foresee_call(work, called.__name__, (owner, *args), kwargs)
        work.spend(_ITEM + sum(map(_shallow, args)))
        found = super().call(context, called, *args, **kwargs)
        work.spend(_shallow(found))
        return found

    def wrap_str_format(self, value: Any) -> Any:
        """`str.format`, with a look at the widths it is asked for."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> Any:
            _foresee_format(_current(), value.__self__, (args, kwargs))
            return wrapped(*args, **kwargs)

        return formatted


class _Weigher(NodeTransformer):
    """Puts a filter of ours around whatever can grow: what is looped over, made, compared and written."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter(node.iter, _counted, nodes.Const(_short_texts(node)))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        texts = nodes.Const(_short_texts(node))
        self.generic_visit(node)
        node.body.insert(0, nodes.Output([_filter(nodes.Const(""), _written, texts)]).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load"), _joined)

    def visit_List(self, node: nodes.List) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(node, _made)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(node, _made)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, _made) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, _counted) if isinstance(node.arg, nodes.Slice) else node

    def visit_Operand(self, node: nodes.Operand) -> nodes.Operand:
        self.generic_visit(node)
        if not isinstance(node.expr, nodes.Const):
            node.expr = _filter(node.expr, _read)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        texts = sum(length for one in node.nodes if (length := _text_length(one)) >= _SHORT)
        at = next((number for number, one in enumerate(node.nodes) if not isinstance(one, nodes.TemplateData)), None)
        if at is None and texts:
            node.nodes.insert(0, _filter(nodes.Const(""), _written, nodes.Const(texts)))
        elif at is not None:
            node.nodes = [
                one
                if isinstance(one, nodes.TemplateData)
                else _filter(one, _written, nodes.Const(texts if number == at else 0))
                for number, one in enumerate(node.nodes)
            ]
        return node


def _text_length(node: nodes.Node) -> int:
    return len(node.data) if isinstance(node, nodes.TemplateData) else 0


def _short_texts(node: nodes.Node) -> int:
    """Characters of the short texts of a loop or a macro, which are weighed with it."""
    return sum(length for one in node.find_all(nodes.TemplateData) if (length := _text_length(one)) < _SHORT)


def _filter(node: nodes.Node, function: Any, *args: nodes.Expr) -> nodes.Filter:
    made: Any = nodes.Filter(cast(nodes.Expr, node), function.__name__, list(args), [], None, None)
    found: nodes.Filter = made.set_lineno(getattr(node, "lineno", None) or 1)
    return found


# All of them ask for the context, which they do not need: jinja then leaves them out when it computes constants early.
@pass_context
def _counted(context: Any, value: Any, beside: int = 0) -> Any:
    """What is looped over, or a slice: all its items beforehand, so that the loop itself costs nothing more."""
    if not isinstance(value, Sized | jinja2.Undefined):
        value = list(islice(value, MAX_WORK // _ITEM + 1))
    number = 0 if isinstance(value, jinja2.Undefined) else len(value)
    _current().spend(number * (_ITEM + beside))
    return value


@pass_context
def _made(context: Any, value: Any) -> Any:
    """A list, a tuple or a dictionary written in the template; parts that occur twice are counted twice."""
    work = _current()
    work.spend(work.weigh(value))
    return value


@pass_context
def _joined(context: Any, values: Any) -> str:
    work = _current()
    work.spend(work.weigh(values))
    return "".join(map(str, values))


@pass_context
def _read(context: Any, value: Any) -> Any:
    """What something is compared with."""
    _current().spend(1 + _shallow(value) // _ITEM)
    return value


@pass_context
def _written(context: Any, value: Any, beside: int = 0) -> Any:
    if type(value) is str:
        _current().spend(beside + len(value))
    else:
        work = _current()
        work.spend(beside + work.weigh(value))
    return value


def _shallow(value: Any) -> int:
    """The size of a value without its parts."""
    if isinstance(value, str):
        return len(value)
    return _ITEM * len(value) if isinstance(value, list | tuple | dict) else 1


def _foresee_operator(work: _Work, operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str | bytes):
        _foresee_format(work, left, right)
    elif operator == "+":
        work.spend(_shallow(left) + _shallow(right))
    elif operator == "*" and not (isinstance(left, float) or isinstance(right, float)):
        number, other = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(other, int):
            _refuse_if(number.bit_length() + other.bit_length() > _MOST_BITS, "a number of thousands of digits")
        elif isinstance(number, int):
            work.spend(max(0, number) * (len(other) if isinstance(other, str) else work.weigh(other)))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _refuse_if(left.bit_length() * abs(right) > _MOST_BITS, "a number of thousands of digits")


def _foresee_format(work: _Work, text: Any, values: Any) -> None:
    shown = text.decode("latin-1") if isinstance(text, bytes) else str(text)
    _refuse_if(_WIDTH.search(shown) is not None, f"a width without measure: {shown[:60]!r}")
    # A field may be as wide as a number says that is handed over, and a value may stand in it many times.
    _refuse_if("{" in shown.replace("{{", "").partition("{")[2].partition("}")[0], "a width taken from a value")
    work.spend(len(shown) + work.weigh(values) * (1 + shown.count("%") + shown.count("{")))


def _foresee_call(work: _Work, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a method or a filter that would make more than is left, before it does."""
    if name in _LINEAR:
        return
    given = [*args, *kwargs.values()]
    if name == "replace" and len(args) >= 3 and all(isinstance(one, str) for one in args[:3]):
        text, old, new = args[:3]
        work.spend((text.count(old) if old else len(text) + 1) * len(new) + len(text))
        return
    if name == "format":
        _foresee_format(work, args[0], given[1:])
        return
    if name == "sum":
        _refuse_if(any(isinstance(one, list | tuple) for one in given[1:]), "a sum of lists")
        return
    # All others make at most their arguments once for every number and every letter they are given beside.
    beside = [abs(one) for one in given if isinstance(one, int)]
    beside += [len(one) for one in (given if name == "join" else given[1:]) if isinstance(one, str)]
    work.spend(0 if (times := max((1, *beside))) == 1 else work.weigh(given) * times // _ITEM)


def _refuse_if(is_wrong: bool, what: str) -> None:
    if is_wrong:
        raise TemplateLimitError(f"the chat template asks for {what}")


def _within(name: str, function: Any) -> Any:
    """A filter of jinja that is weighed; which of its context it asks for stays as it was."""
    wanted = _PassArg.from_obj(function)

    @pass_context
    def weighed(context: Any, *args: Any, **kwargs: Any) -> Any:
        work = _current()
        _foresee_call(work, name, args, kwargs)
        first = context.environment if wanted is _PassArg.environment else context
        first = context.eval_ctx if wanted is _PassArg.eval_context else first
        found = function(*args, **kwargs) if wanted is None else function(first, *args, **kwargs)
        work.spend(_shallow(found))
        return found

    return weighed


@lru_cache(maxsize=64)
def _compile(text: str) -> jinja2.Template:
    """The template as transformers would compile it, in our environment."""
    _refuse_if(len(text) > MAX_SOURCE, f"{len(text):,} characters of its own, at most {MAX_SOURCE:,} are read")
    made = chat_template_utils._cached_compile_jinja_template("").environment
    made.__class__ = _Bounded  # with all that transformers has put into it
    made.globals.pop("lipsum", None)
    made.filters.pop("pprint", None)
    made.filters |= {name: _within(name, function) for name, function in made.filters.items() if name not in _AT_ONCE}
    made.filters |= {function.__name__: function for function in (_counted, _made, _joined, _read, _written)}
    return made.from_string(text)  # type: ignore[no-any-return]


_plain_compile = chat_template_utils._compile_jinja_template


def _compile_where_bounded(text: str) -> jinja2.Template:
    """Ours inside of `apply_template`, else that of transformers."""
    return _plain_compile(text) if _work.get() is None else _compile(text)


chat_template_utils._compile_jinja_template = _compile_where_bounded
