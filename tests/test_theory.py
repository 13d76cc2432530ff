"""Every theorem, lemma, corollary and proposition of the paper on random heads, in float64.

A `Row` is one query's view: key m sits at position m, the query at the last position, its own key included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gape import theory

EPS = 1e-9


def for_all(*strategies):
    """A property over the strategies; the same examples at every run, and nothing written to disk."""
    fixed = settings(deadline=None, max_examples=40, derandomize=True, database=None)
    return lambda test: fixed(given(*strategies)(test))


@dataclass
class Row:
    """One row of attention: scores (n,), landmarks (n,), the query's rate and the bound on |scores|."""

    scores: Tensor
    landmarks: Tensor
    rate: float
    s_max: float

    def __post_init__(self) -> None:
        self.i = len(self.scores) - 1
        self.keys = torch.arange(self.i + 1)
        self.distances = self.i - self.keys
        # The paper's U_i.
        self.unprotected = (self.landmarks < 1) & (self.keys < self.i)
        # Written out, so that the tests do not lean on the functions they test.
        self.logits = self.scores - self.rate * (1 - self.landmarks) * self.distances
        self.attention = self.logits.softmax(-1)


# Scores and landmarks often sit at the ends of their ranges: there the bounds are tight.
signs = st.one_of(st.sampled_from([-1.0, 1.0]), st.floats(-1, 1))
partial = st.one_of(st.sampled_from([0.0, 0.5, 0.99]), st.floats(0, 0.99))
gates = st.one_of(st.just(1.0), partial)
rates = st.floats(0.01, 3)
bounds = st.floats(0.01, 5)


@st.composite
def rows(draw, landmarks=gates):
    n, s_max = draw(st.integers(2, 24)), draw(bounds)
    scores = s_max * torch.tensor(draw(st.lists(signs, min_size=n, max_size=n)), dtype=torch.float64)
    drawn = torch.tensor(draw(st.lists(landmarks, min_size=n, max_size=n)), dtype=torch.float64)
    return Row(scores, drawn, draw(rates), s_max)


def worst_row(distances: Sequence[int], rate: float, s_max: float, landmark: float = 0.0) -> Row:
    """The head that the bounds are tight on: own score −s_max, keys at `distances` +s_max, all others absent."""
    i = max(distances)
    scores = torch.full((i + 1,), -torch.inf, dtype=torch.float64)
    scores[[i - d for d in distances]] = s_max
    scores[i] = -s_max
    return Row(scores, torch.full((i + 1,), landmark, dtype=torch.float64), rate, s_max)


def entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum()


def attention(row: Row) -> Tensor:
    """What `theory.mask` makes of the row."""
    return (row.scores + theory.mask(row.i, row.keys, row.rate, row.landmarks)).softmax(-1)


@for_all(rows())
def test_proposition_1_both_masks_give_the_same_attention(row):
    relative = (row.scores + theory.relative_mask(row.i, row.keys, row.rate, row.landmarks)).softmax(-1)
    torch.testing.assert_close(attention(row), row.attention, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(relative, row.attention, rtol=1e-9, atol=1e-12)


def test_proposition_1_two_coordinates_carry_the_mask():
    rng = torch.Generator().manual_seed(0)
    n, d, amplitude, T = 12, 8, 1.3, 64
    q, k = torch.randn(2, n, d - 2, generator=rng, dtype=torch.float64)
    g, landmarks = torch.rand(2, n, generator=rng, dtype=torch.float64)
    i, root = torch.arange(n, dtype=torch.float64), math.sqrt(d)
    wide_q = torch.column_stack([q, amplitude * g * root, amplitude * g * i / T * root])
    wide_k = torch.column_stack([k, i * (1 - landmarks) / T, landmarks])
    mask = theory.mask(i[:, None], i, (amplitude * g / T)[:, None], landmarks)
    torch.testing.assert_close(wide_q @ wide_k.T / root, q @ k.T / root + mask)
    assert torch.linalg.matrix_rank(mask) == 2


@for_all(rows(), st.integers(-1000, 1000))
def test_proposition_2_attention_is_translation_invariant(row, offset):
    shifted = row.i + offset, row.keys + offset, row.rate, row.landmarks
    for mask in (theory.mask, theory.relative_mask):
        torch.testing.assert_close((row.scores + mask(*shifted)).softmax(-1), row.attention, rtol=1e-7, atol=1e-12)


@for_all(rates, gates, st.integers(1, 1000))
def test_theorem_1_a_full_landmark_pays_as_little_as_the_own_key(rate, own_landmark, distance):
    own = theory.mask(1000, 1000, rate, own_landmark)
    assert theory.mask(1000, 1000 - distance, rate, 1.0) == pytest.approx(own, rel=1e-12)


@for_all(st.integers(0, 50), st.integers(1, 50), st.integers(1, 50), partial, rates)
def test_theorem_1_threshold_separates_the_two_orders(a, b_minus_a, i_minus_b, landmark_b, rate):
    b, i = a + b_minus_a, a + b_minus_a + i_minus_b
    threshold = theory.landmark_threshold(i, a, b, landmark_b)
    assert 0 < threshold < 1
    newer = theory.mask(i, b, rate, landmark_b)
    assert theory.mask(i, a, rate, threshold + 1e-6) > newer
    assert theory.mask(i, a, rate, threshold - 1e-6) < newer


@for_all(rows())
def test_theorem_2_bounds_the_mass_of_the_other_keys(row):
    bound = theory.unprotected_mass_bound(row.distances[:-1], row.rate, row.s_max, row.landmarks[:-1])
    # The sharper B/(1 + B), which the proof gives for nothing.
    assert row.attention[:-1].sum() <= bound / (1 + bound) + EPS


@for_all(st.lists(st.integers(1, 60), min_size=1, max_size=8, unique=True), rates, bounds, partial)
def test_theorem_2_is_attained(distances, rate, s_max, landmark):
    row = worst_row(distances, rate, s_max, landmark)
    bound = theory.unprotected_mass_bound(torch.tensor(distances), rate, s_max, landmark)
    torch.testing.assert_close(row.attention[:-1].sum(), bound / (1 + bound), rtol=1e-9, atol=0)


def test_theorem_2_fails_for_a_partial_landmark_when_u_is_left_out():
    row = worst_row([100], rate=0.1, s_max=1.0, landmark=0.99)
    assert row.attention[0] > 100 * theory.unprotected_mass_bound(100, 0.1, 1.0)
    assert row.attention[0] <= theory.unprotected_mass_bound(100, 0.1, 1.0, landmark=0.99)


@for_all(rows(landmarks=partial))
def test_theorem_2_simple_form_takes_the_smallest_discounted_distance(row):
    discounted = ((1 - row.landmarks) * row.distances)[:-1]
    simple = theory.unprotected_mass_bound_simple(discounted.min(), row.rate, row.s_max, row.i)
    full = theory.unprotected_mass_bound(row.distances[:-1], row.rate, row.s_max, row.landmarks[:-1])
    assert full <= simple * (1 + EPS)
    at_one_distance = theory.unprotected_mass_bound(discounted.min().expand(row.i), row.rate, row.s_max)
    torch.testing.assert_close(simple, at_one_distance)


@for_all(rows(), st.floats(0.001, 0.999))
def test_hidden_keys_hold_at_most_p_together_and_p_over_n_each(row, p):
    n = max(1, int(row.unprotected.sum()))
    calls = theory.visible(row.i, row.keys, row.rate, row.s_max, n, p, row.landmarks)
    hidden = row.attention[~calls]
    assert hidden.sum() <= p + EPS
    assert (hidden <= p / n + EPS).all()


@for_all(rates, bounds, st.integers(1, 10**6), st.floats(0.001, 0.999), partial)
def test_a_key_disappears_at_its_own_horizon(rate, s_max, n, p, landmark):
    context = theory.effective_context_length(rate, s_max, n, p)
    assert theory.unprotected_mass_bound_simple(context, rate, s_max, n) == pytest.approx(p)
    horizon = context / (1 - landmark)
    assert theory.visible(0, -horizon * (1 - EPS), rate, s_max, n, p, landmark)
    assert not theory.visible(0, -horizon * (1 + EPS), rate, s_max, n, p, landmark)


@pytest.mark.parametrize("n", [0, 1, 10])
def test_a_full_landmark_and_the_own_key_are_always_visible(n):
    assert theory.visible(10**9, 0, 3.0, 0.0, n, 0.999, landmark=1.0) is True
    assert theory.visible(5, 5, 3.0, 0.0, n, 0.999, landmark=0.0) is True


def test_one_horizon_for_all_keys_would_hide_a_key_that_holds_nearly_everything():
    rate, s_max, p = 1.0, 4.0, 0.01
    distance = math.ceil(theory.effective_context_length(rate, s_max, 1, p))
    assert worst_row([distance], rate, s_max, landmark=0.99).attention[0] > 0.99
    assert not theory.visible(distance, 0, rate, s_max, 1, p)
    assert theory.visible(distance, 0, rate, s_max, 1, p, landmark=0.99)


@for_all(rows())
def test_corollary_1_attention_inside_the_protected_set_ignores_the_gate(row):
    inside = attention(row)[~row.unprotected]
    expected = row.scores[~row.unprotected].softmax(-1)
    torch.testing.assert_close(inside / inside.sum(), expected, rtol=1e-9, atol=1e-12)


@for_all(rows())
def test_corollary_1_distance_in_total_variation_is_the_unprotected_mass(row):
    u = row.unprotected
    limit = row.scores.masked_fill(u, -torch.inf).softmax(-1)
    total_variation = (attention(row) - limit).abs().sum() / 2
    torch.testing.assert_close(total_variation, row.attention[u].sum(), rtol=1e-7, atol=1e-12)
    bound = theory.unprotected_mass_bound(row.distances[u], row.rate, row.s_max, row.landmarks[u])
    assert total_variation <= bound + EPS


@for_all(rows())
def test_corollary_1_entropy_tends_to_that_of_the_protected_set(row):
    limit = entropy(row.scores[~row.unprotected].softmax(-1))
    # 2·s_max + 25 logits for a key one token away with the largest landmark drawn, 0.99.
    contracted = replace(row, rate=100 * (2 * row.s_max + 25))
    torch.testing.assert_close(entropy(attention(contracted)), limit, rtol=0, atol=1e-6)


def test_corollary_1_limits_do_not_commute_a_nearly_full_landmark_is_forgotten_too():
    # Both keys score alike: entropy log 2 with l = 1 at every rate, and 0 in the limit with any l < 1.
    nearly, fully = torch.tensor([[1 - 1e-6, 0.0], [1.0, 0.0]], dtype=torch.float64)
    row = Row(torch.zeros(2, dtype=torch.float64), nearly, rate=1e8, s_max=0.0)
    assert entropy(attention(row)) < 1e-6
    assert entropy(attention(replace(row, landmarks=fully))).item() == pytest.approx(math.log(2))


@for_all(rows(), st.floats(0.001, 1), partial)
def test_lemma_1_bounds_the_partition_function(row, share, max_landmark):
    protected = 1 + int((row.landmarks[:-1] > max_landmark).sum())
    log_z = (row.scores + theory.mask(row.i, row.keys, row.rate, row.landmarks)).logsumexp(-1)
    bound = theory.log_partition_bound(row.i, row.rate, share * row.rate, row.s_max, protected, max_landmark)
    assert log_z <= bound + EPS


@for_all(rates, bounds, partial)
def test_lemma_1_is_attained_by_a_long_context(rate, s_max, landmark):
    # 100 logits of distance at the far end: what the finite sum leaves out is below rounding.
    i = math.ceil(100 / (rate * (1 - landmark)))
    log_z = (s_max + theory.mask(i, torch.arange(i + 1), rate, landmark)).logsumexp(-1)
    bound = theory.log_partition_bound(i, rate, rate, s_max, 1, landmark)
    assert log_z.item() == pytest.approx(bound, rel=1e-9)


@for_all(rates, st.floats(1, 10), partial)
def test_lemma_1_counts_the_background_at_the_smallest_rate(rate_min, times, landmark):
    rate = torch.tensor([rate_min, times * rate_min], dtype=torch.float64)
    at_smallest, above = theory.log_partition_bound(0, rate, rate_min, 1.0, 2, landmark)
    assert at_smallest == above


def test_lemma_1_fails_for_partial_landmarks_when_they_are_left_out():
    i, rate, landmark, keys = 1000, 0.1, 0.9, torch.arange(1001)
    mask = theory.mask(i, keys, rate, landmark)
    assert (mask[:-1] > rate * keys[:-1]).all(), "the lemma's assumption on M fails at every key"
    assert mask.logsumexp(-1) > theory.log_partition_bound(i, rate, rate, 0.0, 1) + 1
    assert mask.logsumexp(-1) <= theory.log_partition_bound(i, rate, rate, 0.0, 1, landmark)


@for_all(rows())
def test_theorem_3_bounds_the_logit_gap(row):
    gap = row.logits[-1] - row.logits
    bound = theory.logit_gap_bound(row.distances, row.rate, row.s_max, row.landmarks)
    assert (gap >= bound - EPS).all()


@for_all(st.integers(1, 1000), bounds, st.floats(0.1, 3), partial)
def test_theorem_3_gate_decides_the_worst_head(distance, s_max, amplitude, landmark):
    gate = theory.gate_to_eliminate(distance, s_max, amplitude, 512, landmark)
    for factor, eliminated in [(1 + 1e-6, True), (1 - 1e-6, False)]:
        rate = amplitude * gate * factor / 512
        logits = worst_row([distance], rate, s_max, landmark).logits
        gap = (logits[-1] - logits[0]).item()
        assert (gap > 0) is eliminated
        assert gap == pytest.approx(theory.logit_gap_bound(distance, rate, s_max, landmark), abs=1e-9)


def test_theorem_3_a_far_key_needs_hardly_any_gate():
    gate = theory.gate_to_eliminate(torch.tensor([1e3, 1e6, 1e12]), 10.0, 1.0, 1024, landmark=0.5)
    assert (gate.diff() < 0).all()
    assert gate[-1] < 1e-6


def test_theorem_3_an_eliminated_key_is_outranked_but_not_removed():
    s_max, rate, distances = 2.0, 0.0041, range(1000, 2000)
    assert theory.elimination_distance(rate, s_max) < min(distances)
    row = worst_row(distances, rate, s_max)
    assert row.attention.argmax() == row.i
    assert row.attention[row.i] < 0.01


def test_a_query_cannot_raise_its_gate_without_raising_its_scores():
    # The gate reads the query that also scores: the distance of Theorem 3 has a floor, reached by ever longer queries.
    T, scale, k_norm, w_norm, bias = 1024, 0.125, 8.0, 0.5, torch.tensor(-3.0, dtype=torch.float64)
    q_norm = torch.logspace(0, 6, 25, dtype=torch.float64)
    gate = torch.nn.functional.softplus(w_norm * q_norm + bias)
    times_floor = theory.elimination_distance(gate / T, scale * q_norm * k_norm) / (2 * scale * k_norm * T / w_norm)
    assert (times_floor > 1).all()
    assert times_floor[-1] < 1.0001


@for_all(rows(), st.data())
def test_proposition_3_a_needle_wins_if_and_only_if_it_beats_the_margin(row, data):
    k = data.draw(st.integers(0, row.i - 1))
    margin = theory.retrieval_margin(row.i, k, row.rate, row.landmarks[k])
    for nudge in (-1e-6, 1e-6):
        scores = row.scores.clone()
        scores[k] = scores[-1] + margin + nudge
        logits = replace(row, scores=scores).logits
        assert (logits[k] > logits[-1]) == (nudge > 0)


@for_all(bounds, rates, partial)
def test_corollary_2_no_score_wins_from_the_elimination_distance_on(s_max, rate_min, landmark):
    distance = theory.elimination_distance(rate_min, s_max, landmark)
    assert theory.retrieval_margin(0, -distance * (1 - EPS), rate_min, landmark) < 2 * s_max
    assert theory.retrieval_margin(0, -distance * (1 + EPS), rate_min, landmark) > 2 * s_max


@for_all(bounds, rates, st.floats(0, 0.99))
def test_corollary_2_retrieval_limit_is_where_the_best_score_stops_winning(s_max, rate, depth):
    limit = theory.retrieval_limit(rate, s_max, depth)
    for i, wins in [(limit * (1 - EPS), True), (limit * (1 + EPS), False)]:
        assert (theory.retrieval_margin(i, depth * i, rate, 0.0) < 2 * s_max) is wins


@for_all(bounds, rates, st.floats(0, 0.99), st.floats(1.01, 100))
def test_corollary_2_required_landmark_is_where_the_best_score_starts_winning(s_max, rate, depth, times):
    limit = theory.retrieval_limit(rate, s_max, depth)
    assert theory.required_landmark(limit / times, depth, rate, s_max) == 0
    i = times * limit
    landmark = theory.required_landmark(i, depth, rate, s_max)
    assert 0 < landmark < 1
    for nudged, wins in [(landmark + 1e-6, True), (landmark - 1e-6, False)]:
        assert (theory.retrieval_margin(i, depth * i, rate, nudged) < 2 * s_max) is wins


def test_score_bound_holds_under_rotation_and_is_attained():
    rng = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 3, 16, 8, generator=rng, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=rng, dtype=torch.float64)).Q
    scores = (0.35 * q @ rotation @ k.mT).abs()
    bound = theory.score_bound(q, k, 0.35)
    assert bound.shape == (3,)
    assert (scores.amax((-1, -2)) <= bound).all()
    torch.testing.assert_close(theory.score_bound(q[:, :1], q[:, :1], 0.35), 0.35 * q[:, 0].square().sum(-1))
    per_query = theory.score_bound(q.unsqueeze(-2), k.unsqueeze(-3), 0.35)
    torch.testing.assert_close(per_query.amax(-1), bound)
    assert (scores.amax(-1) <= per_query).all()


def test_python_numbers_give_python_numbers():
    assert type(theory.mask(3, 1, 1, 0)) is float
    assert type(theory.visible(3, 1, 1, 1, 2, 0.5)) is bool


@pytest.mark.parametrize(
    ("given_dtype", "expected"),
    [(torch.int64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_tensors_give_tensors_of_the_promoted_dtype(given_dtype, expected):
    i = torch.arange(1000, 1004)[:, None]
    bias = theory.relative_mask(i, torch.arange(3), torch.ones(4, 1, dtype=given_dtype), 0.0)
    assert bias.shape == (4, 3)
    assert bias.dtype == expected
    assert bias[3, 2] == -1001


def test_gradients_flow_and_stay_finite_where_the_value_is_infinite():
    rate = torch.tensor([0.0, 0.5], dtype=torch.float64, requires_grad=True)
    distance = theory.elimination_distance(rate, 3.0)
    assert distance.tolist() == [math.inf, 12.0]
    distance[1].backward()
    assert rate.grad.tolist() == [0.0, -24.0]


def test_without_a_penalty_the_bound_is_infinite():
    assert theory.effective_context_length(0.0, 1.0, 10, 0.1) == math.inf
    assert theory.elimination_distance(1.0, 1.0, landmark=1.0) == math.inf
    assert theory.gate_to_eliminate(10, 1.0, 1.0, 64, landmark=1.0) == math.inf
    assert theory.retrieval_limit(0.0, 1.0, 0.5) == math.inf
    assert theory.log_partition_bound(10, 1.0, 1.0, 1.0, 1, max_landmark=1.0) == math.inf


def test_large_exponents_do_not_overflow():
    assert theory.unprotected_mass_bound(10_000, 1.0, 4999.0) == pytest.approx(math.exp(-2))
    assert theory.unprotected_mass_bound_simple(0, 1.0, 1e3, 0) == 0
    assert theory.unprotected_mass_bound(torch.empty(3, 0), 1.0, 1e3).tolist() == [0, 0, 0]
    assert theory.log_partition_bound(10**6, 900.0, 900.0, 1.0, 2) == pytest.approx(1 + 9e8 + math.log(2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.mask(3, 1, -0.5, 0.0), r"rate must be finite and >= 0, got -0\.5"),
        (lambda: theory.relative_mask(3, 1, 0.5, torch.tensor([0.5, 1.5])), r"landmark must be in \[0, 1\], got 1\.5"),
        (lambda: theory.landmark_threshold(5, 3, 2, 0.0), r"a must be before b, got 3"),
        (lambda: theory.unprotected_mass_bound_simple(1, 1.0, 1.0, -1), r"n_unprotected must be .* got -1"),
        (lambda: theory.effective_context_length(1.0, 1.0, 5, 0), r"p must be in \(0, 1\), got 0"),
        (lambda: theory.logit_gap_bound(1, 1.0, math.nan), r"s_max must be .* got nan"),
        (lambda: theory.log_partition_bound(1, 1.0, 2.0, 1.0, 1), r"rate_min must be at most rate, got 2"),
        (lambda: theory.retrieval_limit(1.0, 1.0, 1.0), r"depth must be in \[0, 1\), got 1"),
        (lambda: theory.score_bound(torch.ones(2, 3), torch.ones(2, 4), 1.0), r"same D, got \(2, 3\), \(2, 4\)"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
