"""What a page shows is what the model computes: maps, rows, entropy, horizons and evicted keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gape
from gape.analysis import attended, statistics
from gape.analysis.routing import effective_context
from gape.explore.exploration import Exploration, HeadRows, explore, followers, gates_off, pooled
from gape.explore.view import EPS, LEAST_WEIGHT, View, levels, parsed_heads, weight_bytes
from gape.models import ForgettingCache

TOKENS = 600


def gpt(position: str = "p-rope+gape", **options: object) -> gape.GPT:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 64, "context_length": 64}
    model = gape.GPT(gape.GPTConfig(vocab_size=257, position=position, **sizes, options=options)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return model


def read(model: gape.GPT, n: int = TOKENS) -> tuple[torch.Tensor, Exploration]:
    ids = torch.randint(257, (1, n), generator=torch.Generator().manual_seed(1))
    return ids, explore(model, ids, lambda token: f"<{token}>", title="test", about={"name": "test"})


@pytest.fixture(scope="module")
def model() -> gape.GPT:
    return gpt(gate_floor=8.0)


@pytest.fixture(scope="module")
def exploration(model: gape.GPT) -> Exploration:
    return read(model)[1]


@pytest.mark.parametrize("position", ["p-rope+gape", "nope", "alibi", "fox"])
@pytest.mark.parametrize("gated", [True, False])
def test_rows_are_the_weights_of_the_definition(position: str, gated: bool) -> None:
    ids = torch.randint(257, (1, 200), generator=torch.Generator().manual_seed(2))
    layer = attended(gpt(position).double(), ids)[1]
    if not gated and layer.gates is not None:
        plain = torch.softmax(
            (layer.scale * layer.q[0, 3] @ layer.k[0, 1].T).masked_fill(
                torch.ones(200, 200).triu(1).bool(), -torch.inf
            ),
            -1,
        )
    else:
        plain = layer.weights(0, 200)[0, 3]
    weights, entropy = HeadRows(layer, 3, gated).weights(70, 130)
    expected = plain[70:130, : weights.size(1)]
    torch.testing.assert_close(weights.double(), expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(entropy.double(), torch.special.entr(expected).sum(-1), atol=1e-5, rtol=1e-4)


def test_one_head_of_the_weights_is_that_of_all(model: gape.GPT) -> None:
    for position in ("p-rope+gape", "alibi", "fox"):
        layer = attended(gpt(position), torch.randint(257, (2, 50)))[0]
        torch.testing.assert_close(layer.weights(10, 30, 3), layer.weights(10, 30)[:, 3:4])


def test_every_level_of_a_map_is_the_largest_weight_of_its_cells(model: gape.GPT, exploration: Exploration) -> None:
    ids, _ = read(model)
    layer = attended(model, ids)[1]
    weights = layer.weights(0, TOKENS)[0, 2]
    for level, cell in levels(TOKENS):
        expected = weight_bytes(pooled(weights, cell).numpy())
        side = expected.shape[0]
        tiles = -(-side // 256)
        rows = [[exploration.tile("gated", 1, 2, level, r, c) for c in range(tiles)] for r in range(tiles)]
        assert np.abs(np.block(rows)[:side, :side].astype(int) - expected).max() <= 1
    assert (
        np.abs(exploration.view.arrays["map_gated"][1, 2].astype(int) - weight_bytes(pooled(weights, 4).numpy())).max()
        <= 1
    )
    row = exploration.row("gated", 1, 2, 333).astype(int)
    assert np.abs(row - weight_bytes(weights[333].numpy())).max() <= 1


def test_cells_at_the_end_may_be_smaller() -> None:
    weights = torch.arange(35.0).view(5, 7)
    assert pooled(weights, 4).tolist() == [[24, 27], [31, 34]]


def test_numbers_of_heads_are_those_of_the_analysis(model: gape.GPT, exploration: Exploration) -> None:
    layers = attended(model, read(model)[0])
    arrays, header = exploration.view.arrays, exploration.view.header
    for number, layer in enumerate(layers):
        torch.testing.assert_close(
            torch.from_numpy(arrays["entropy_gated"][number]),
            statistics(layer).entropy[0].mean(-1),
            rtol=1e-4,
            atol=1e-5,
        )
        # As the page computes it from bytes, for eps = 0.01.
        low, high = (arrays["gate_range"][number, :, end : end + 1] for end in (0, 1))
        rate = low * (high / low) ** (arrays["gate"][number] / 255) * arrays["rate_per_gate"][number][:, None]
        low, high = (arrays["score_range"][number, :, end : end + 1] for end in (0, 1))
        bound = low * (high / low) ** (arrays["score"][number] / 255)
        horizon = (2 * bound + np.log(np.maximum(np.arange(header["tokens"]), 1) / 0.01)) / rate
        np.testing.assert_allclose(horizon, effective_context(layer, 0.01)[0], rtol=0.05)


def test_evicted_keys_are_those_of_a_forgetting_cache(model: gape.GPT, exploration: Exploration) -> None:
    step = EPS.index(1e-2)
    cache = ForgettingCache(model, eps=EPS[step], bounds="queries")
    with torch.no_grad():
        model(read(model)[0], cache=cache, logits_to_keep=1)
    cache.evict()
    kept = (exploration.view.arrays["evicted_at"] > step).sum(-1)
    assert exploration.view.arrays["floor"].all()
    assert kept.min() > 0
    assert kept.max() < TOKENS
    # The view leaves room for the rounding of bfloat16, the cache for that of float32.
    np.testing.assert_allclose(kept, cache.num_keys, rtol=0.05)
    assert (kept >= np.array(cache.num_keys)).all()


def test_gates_are_off_inside_the_block_alone(model: gape.GPT) -> None:
    ids = read(model)[0]
    with torch.no_grad():
        before = model(ids).logits
        with gates_off(model):
            off = model(ids).logits
        assert torch.equal(model(ids).logits, before)
    assert not torch.allclose(off, before)


def test_predictions_are_the_most_likely_next_tokens(model: gape.GPT, exploration: Exploration) -> None:
    with torch.no_grad():
        best = model(read(model)[0]).logits[0].softmax(-1).topk(5)
    arrays, vocabulary = exploration.view.arrays, exploration.view.header["vocabulary"]
    assert [[vocabulary[p] for p in row] for row in arrays["next"]] == [
        [f"<{token}>" for token in row] for row in best.indices.tolist()
    ]
    assert np.abs(arrays["next_probability"] / 255 - best.values.numpy()).max() <= 0.5 / 255 + 1e-6


def test_followers_are_the_tokens_behind_the_last_occurrence() -> None:
    assert followers(torch.tensor([5, 6, 5, 7, 7, 6, 5])).tolist() == [-1, -1, 1, -1, -1, 2, 3]


def test_a_model_without_gates_has_a_view_without_them() -> None:
    _, exploration = read(gpt("alibi"), 40)
    assert not exploration.view.header["gated"]
    assert {"map_gated", "entropy_gated", "next", "token"} <= set(exploration.view.arrays)
    assert "gate" not in exploration.view.arrays


def test_a_view_comes_back_from_its_file(exploration: Exploration, tmp_path) -> None:
    exploration.view.save(tmp_path / "view.gz")
    back = View.load(tmp_path / "view.gz")
    assert back.header == exploration.view.header
    assert all(np.array_equal(back.arrays[name], array) for name, array in exploration.view.arrays.items())
    with pytest.raises(ValueError, match="view"):
        View.from_bytes(b"no view at all")


def test_weights_become_bytes_by_their_logarithm() -> None:
    weights = np.array([0, LEAST_WEIGHT / 2, LEAST_WEIGHT**0.5, 1])
    assert weight_bytes(weights).tolist() == [0, 0, 128, 255]


def test_heads_are_read_or_refused() -> None:
    assert parsed_heads("0.1, 1.3,0.1", 2, 4) == [(0, 1), (1, 3)]
    for wrong in ("2.0", "0.4", "1", "a.b", "-1.0"):
        with pytest.raises(ValueError, match="heads"):
            parsed_heads(wrong, 2, 4)


def test_places_outside_the_text_are_refused(exploration: Exploration) -> None:
    for wrong in (
        ("gated", 0, 0, 9, 0, 0),
        ("gated", 0, 0, 1, 5, 0),
        ("other", 0, 0, 1, 0, 0),
        ("gated", 0, 7, 1, 0, 0),
    ):
        with pytest.raises(ValueError, match=r"tile|head"):
            exploration.tile(*wrong)
    with pytest.raises(ValueError, match="query"):
        exploration.row("gated", 0, 0, TOKENS)
