"""Settings: every bad one is refused by name, every good one survives being written down."""

import json

import pytest

from gape.train import TrainConfig
from tests.wrong import each_wrong


@each_wrong(
    max_steps=(0, 1.5), learning_rate=(0.0, float("nan")), min_learning_rate=(1.0,), warmup_steps=(-1,),
    decay_steps=(0,), betas=((0.9,), (0.9, 1.0), ("0.9", "0.95")), seed=(2**64,), weight_decay=(-0.1,), clip=("1",),
    accumulation=(True,), precision=("float16",), compile=(True,), deterministic=(1,), keep_last=(0,),
    progress=("loud",),
)  # fmt: skip
def test_bad_values_are_refused_by_name(argument, value):
    with pytest.raises(ValueError, match=f"^{argument}: got "):
        TrainConfig(**({"max_steps": 10} | {argument: value}))


def test_a_config_survives_json():
    config = TrainConfig(max_steps=10, betas=(0.8, 0.9), check_every=3)
    assert TrainConfig(**json.loads(json.dumps(config.to_dict()))) == config
    assert config.to_dict()["decay_steps"] == 10
