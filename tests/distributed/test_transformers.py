"""Models of transformers under accelerate: FSDP2 leaves gates in float32, context parallelism of its own is refused."""

import pytest

from tests.distributed.launch import work

pytest.importorskip("accelerate")


def test_context_parallelism_of_accelerate_is_refused():
    from accelerate import big_modeling

    import gape.hf
    from tests.hf.tiny import tiny, tokens

    model = gape.hf.inject(tiny("llama"), context_length=16)
    big_modeling._attach_context_parallel_hooks(model)
    with pytest.raises(ValueError, match=r"gape\.distributed\.context_parallel"):
        model(tokens())


@pytest.mark.slow
def test_gates_stay_float32_where_accelerate_shards_in_bfloat16(tmp_path):
    found = work(2, "accelerate", tmp_path)
    assert found == {"gates": "torch.float32", "q": "torch.bfloat16", "gradient": "torch.float32", "finite": True}
