"""Ways to make a model of `transformers` read longer texts: floors by theorem, YaRN, no rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gape.hf.families import family_of, rope_theta
from gape.hf.floors import FloorPlan, plan_floors
from gape.hf.heads import sizes
from gape.hf.injection import inject
from gape.hf.sinks import CLOSED, SinkLandmarks, set_landmarks
from gape.utils.validation import invalid_argument, whole

#: By name: what is put into a model.
METHODS = {
    "ours": "gates with floors that keep each head within its trained range; free retrieval heads turn in range",
    "yarn": "YaRN's frequencies, no gates",
    "nope": "no rotation, no gates",
    "floors": "gates with the floors of a file, the model's own rotation",
    "plain": "nothing; the model is only measured",
}
#: No key is a landmark, so that floors bound what a head sees.
GATES: Mapping[str, Any] = {"learn_landmark": False, "init_landmark_bias": CLOSED}
#: The floor of heads that are not free: a key T/80 tokens away has lost one logit at least.
FLOOR = 80.0
#: One in so many key heads is left free by default.
FREE_SHARE = 6.4


def native_context(model: Any) -> int:
    """The context of a model that can be extended: without gates, with a plain rotation, of a known family."""
    sizes(model)
    family = family_of(model)
    if not family.layout.rotary:
        raise invalid_argument("model", family.model_type, "one with rotary positions; gape hf inject gives it some")
    rope_theta(model.config)
    return int(model.config.max_position_embeddings)


def refuse_target(native: int, to: int) -> None:
    """Refuse a length that a model reads already."""
    if whole("to", to) <= native:
        raise invalid_argument("to", to, f"more than {native}, the model's own context")


def default_free(model: Any) -> int:
    """How many key heads are left free where nobody says it: about one in six, one at least."""
    layers, _, n_kv_heads = sizes(model)
    return max(1, round(layers * n_kv_heads / FREE_SHARE))


def floor_plan(model: Any, head_score: Tensor, free: int, ids: Tensor, **options: Any) -> FloorPlan:
    """A plan for a model without gates: every head turns within its trained range, and all but `free` have a floor.

    Rotations that meet no new angle need no floor; these floors are for the cache. Scores (L, Hk) are those of
    :func:`gape.hf.heads.head_scores`, bounds are measured on ids (B, N). Options of :func:`gape.hf.plan_floors` win.
    """
    chosen: dict[str, Any] = {
        "free": free, "scores": head_score, "bounds": "scores", "ids": ids, "position": "hope", "least": FLOOR,
    }  # fmt: skip
    return plan_floors(model, **(chosen | options))


def put_in(
    model: Any,
    method: str,
    *,
    to: int,
    plan: FloorPlan | None = None,
    landmarks: SinkLandmarks | None = None,
    floors: list[list[float]] | None = None,
    factor: float | None = None,
    log_scale: bool = False,
) -> Any:
    """Put what a method of :data:`METHODS` needs into a model without gates, in place, and name `to` as its context.

    Args:
        plan, landmarks, log_scale: for "ours": of floors; gates that keep sinks in view, without which no key is a
            landmark; whether logits of queries beyond the native context grow with its logarithm, without a floor.
        floors: a list for each layer, for "floors".
        factor: of YaRN; `to` over the native context by default.

    Raises:
        ValueError: an unknown method, or an argument that it needs or does not take.
    """
    if method not in METHODS:
        raise invalid_argument("method", method, f"one of {', '.join(METHODS)}")
    native = native_context(model)
    refuse_target(native, to)
    if method == "ours":
        if plan is None:
            raise invalid_argument("plan", None, "a plan of floors")
        options: dict[str, Any] = {"log_scale": True} if log_scale else {}
        gates = GATES if landmarks is None else {"init_landmark_bias": CLOSED}
        inject(model, floors=plan, start="paper", gates=gates, **options)
        if landmarks is not None:
            set_landmarks(model, landmarks)
    elif method == "floors":
        inject(model, context_length=native, start="paper", gates={**GATES, "gate_floor": floors})
    elif method == "yarn":
        inject(model, position="yarn", context_length=native, factor=factor or to / native)
    elif method == "nope":
        inject(model, position="nope", context_length=native)
    if method != "plain":
        # Removing what was put in sets it back.
        model.config.gape["native"] = native
        model.config.max_position_embeddings = to
    return model
