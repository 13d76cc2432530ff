"""Names, options and refusals."""

from collections.abc import Iterator

import pytest
import torch

import gape
from gape.positions import Gated, Rotary, Scheme, available, build, register, unregister

TAKE_GATES = ["nope", "rope", "p-rope", "hope", "pi", "ntk", "yarn", "longrope"]
BASES = [*TAKE_GATES, "alibi", "kerple", "fire", "t5", "fox", "grape", "swan"]


def make(name: str, **arguments: object) -> Scheme:
    sizes = {"n_heads": 4, "head_dim": 8, "context_length": 64, "n_embd": 16}
    return build(name, **{**sizes, **arguments})


def test_names() -> None:
    assert available() == BASES + [f"{base}+gape" for base in TAKE_GATES]


@pytest.mark.parametrize("name", available())
def test_every_name_builds_with_defaults(name: str) -> None:
    scheme = make(name)
    assert scheme.n_kv_heads == 4
    assert isinstance(scheme, Gated) == name.endswith("+gape")
    for parameter, value in scheme.named_parameters():
        assert value.dim() > 0
        assert "gamma" not in parameter
        assert "beta" not in parameter


@pytest.mark.parametrize("base", BASES[8:])
def test_gates_are_refused_with_the_reason(base: str) -> None:
    with pytest.raises(ValueError, match=r"^name: .*gape may follow") as refusal:
        make(f"{base}+gape")
    assert make(base).refuses_gates in str(refusal.value)


def test_unknown_name_suggests_and_lists() -> None:
    with pytest.raises(ValueError, match=r"name: .*did you mean p-rope\b") as refusal:
        make("prope")
    assert all(name in str(refusal.value) for name in available())
    for nonsense in ("", "rope+gape+gape", "rope+", None, 7):
        with pytest.raises(ValueError, match="name"):
            make(nonsense)


def test_unknown_option_names_scheme_and_options() -> None:
    with pytest.raises(ValueError, match=r"thetta: rope does not take this; it takes the options theta"):
        make("rope", thetta=1.0)
    with pytest.raises(ValueError, match=r"theta: nope does not take this; it takes no options"):
        make("nope", theta=1.0)
    with pytest.raises(ValueError, match=r"gate_floor: rope does not take this"):
        make("rope", gate_floor=1.0)
    with pytest.raises(
        ValueError, match=r"fraction: rope\+gape does not take this.*theta, head_positions, log_scale, learn_gate"
    ):
        make("rope+gape", fraction=0.5)


def test_options_reach_base_and_gates() -> None:
    scheme = make("p-rope+gape", n_kv_heads=2, fraction=0.5, gate_floor=4.0, learn_landmark=False)
    assert isinstance(scheme, Gated)
    assert scheme.base.inv_freq.count_nonzero() == 2
    assert min(scheme.gates.gate_floor) == 4.0
    assert scheme.gates.landmark_projection is None
    assert scheme.context_length == 64


WRONG: dict[str, list[dict[str, object]]] = {
    "nope": [
        {"head_dim": 0}, {"n_heads": 0}, {"n_heads": 2.0}, {"n_kv_heads": 2, "n_heads": 3}, {"n_kv_heads": 0},
        {"context_length": 0}, {"context_length": float("nan")}, {"n_embd": 0},
    ],
    "rope": [
        {"head_dim": 7}, {"theta": -1.0}, {"head_positions": ["rope", "hope"]}, {"head_positions": 3},
        {"head_positions": ["rope", "hope", "alibi", "rope"]}, {"head_positions": "rope+gape"}, {"log_scale": "yes"},
        {"log_scale": [True]}, {"context_length": 1, "log_scale": True},
    ],
    "rope+gape": [{"context_length": None}],
    "p-rope": [{"fraction": -0.1}, {"fraction": "most"}],
    "hope": [{"context_length": None}],
    "pi": [{"factor": 0.0}, {"factor": None}],
    "ntk": [{"head_dim": 2}],
    "yarn": [{"context_length": None}, {"theta": 1.0}, {"fast_rotations": 1.0, "slow_rotations": 2.0}],
    "longrope": [
        {"context_length": None, "factor": 2.0}, {"factors": [1.0, 2.0]}, {"factors": [1.0, 2.0, 0.0, 1.0]},
    ],
    "kerple": [{"variant": "cubic"}],
    "fire": [{"hidden": 0}, {"init_c": 0.0}, {"init_threshold": -1}],
    "t5": [{"n_buckets": 31}, {"max_distance": 16}],
    "fox": [{"n_embd": None}, {"init_forget_bias": float("inf")}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), [(name, each) for name, given in WRONG.items() for each in given])
def test_values_out_of_range_are_named(name: str, arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(arguments))}: "):
        make(name, **arguments)


class Steep(Rotary):
    """Frequencies that fall twice as fast as those of rope."""

    @staticmethod
    def frequencies(head_dim: int, context_length: float | None, *, theta: float = 1e4) -> tuple[list[float], float]:
        return [theta ** (-4 * n / head_dim) for n in range(head_dim // 2)], 1.0


@pytest.fixture
def registered() -> Iterator[None]:
    register("steep", Steep)
    yield
    unregister("steep")


@pytest.mark.usefixtures("registered")
def test_a_scheme_of_your_own_trains_under_its_name_with_gates_and_without() -> None:
    assert {"steep", "steep+gape"} < set(available())
    assert make("steep", theta=100.0).options()["theta"] == 1e4
    for name in ("steep", "steep+gape"):
        model = gape.GPT(gape.GPTConfig(vocab_size=9, n_layer=1, n_head=2, n_embd=16, context_length=8, position=name))
        ids = torch.randint(9, (2, 12))
        model(ids, targets=ids).loss.backward()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("name", "scheme", "match"),
    [
        ("rope", Steep, "a new one"),
        ("steep", Steep, "a new one"),
        ("a+gape", Steep, "letters"),
        ("a", dict, "subclass"),
    ],
)
def test_names_that_are_taken_and_classes_of_another_kind_are_refused(name: str, scheme: type, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        register(name, scheme)


@pytest.mark.parametrize("name", ["rope", "never-registered"])
def test_only_schemes_of_your_own_can_be_forgotten(name: str) -> None:
    with pytest.raises(ValueError, match="register was called with"):
        unregister(name)
