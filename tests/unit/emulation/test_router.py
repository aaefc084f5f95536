"""Compare the routing of tokens in a mixture of experts with plain torch in float64."""

import pytest
import torch
from torch.nn import functional

from tests.unit.emulation import reference as ref

TOKENS, EXPERTS, HIDDEN = 12, 8, 16
#: fp32 arithmetic of some ten operations.
FP32 = 16 * ref.FP32_UNIT


def _probabilities(logits, topk, pre, groups, group_topk, scale, function, bias):
    """Compute probabilities and routing mask step by step, as in the paper of each score function."""
    score = {
        "softmax": lambda x: x.softmax(-1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: functional.softplus(x).sqrt(),
    }[function]
    scores = score(logits) if pre or function != "softmax" else logits
    ranked = scores.detach() + (0 if bias is None else bias)
    if groups:
        parts = ranked.view(TOKENS, groups, -1)
        best = parts.sort(-1, descending=True).values[..., : topk // group_topk].sum(-1)
        kept = best.argsort(-1, descending=True)[:, :group_topk]
        open_groups = torch.zeros(TOKENS, groups, dtype=torch.bool).scatter(1, kept, True)
        ranked = parts.masked_fill(~open_groups[..., None], -9e9).flatten(1)
    chosen = ranked.argsort(-1, descending=True)[:, :topk]
    mask = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
    if function == "softmax" and not pre:
        probs = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    elif function != "softmax" and topk > 1:
        probs = scores * mask / (scores * mask).sum(-1, keepdim=True)
    else:
        probs = scores * mask
    return probs * (scale or 1.0), mask


CASES = {
    "softmax": (2, False, None, None, None, "softmax", False),
    "softmax before": (3, True, None, None, 2.5, "softmax", False),
    "sigmoid": (4, False, None, None, 1.5, "sigmoid", False),
    "sigmoid, one expert": (1, False, None, None, None, "sigmoid", False),
    "sigmoid, groups, bias": (4, False, 4, 2, 2.0, "sigmoid", True),
    "softplus, bias": (2, False, None, None, None, "sqrtsoftplus", True),
}


@pytest.mark.parametrize("case", CASES)
def test_router_probabilities_and_gradients_match_float64(te, case):
    """Cover every score function, expert groups, and a bias that affects the choice but not the probabilities."""
    from transformer_engine.pytorch import router

    topk, pre, groups, group_topk, scale, function, biased = CASES[case]
    bias = 2 * torch.randn(EXPERTS) if biased else None
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    exact = logits.detach().double().requires_grad_()
    expected, mask = _probabilities(exact, topk, pre, groups, group_topk, scale, function, bias)
    arguments = (topk, pre, groups, group_topk, scale, function, bias)
    probs, routing = router.fused_topk_with_score_function(logits, *arguments)
    assert torch.equal(routing, mask)
    assert ref.distance(probs, expected) <= FP32
    weights = torch.randn(TOKENS, EXPERTS)
    (probs * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ref.distance(logits.grad, exact.grad) <= FP32
    if biased:  # the comparison can fail: without the bias other experts are chosen
        assert not torch.equal(_probabilities(exact, *arguments[:-1], None)[1], mask)


def test_routing_map_formats_are_equivalent(te):
    """Bitmaps and dense indices contain the same routing as the mask. Gradients are bitwise equal."""
    from transformer_engine.pytorch import router

    arguments = (3, True, None, None, None, "softmax", None)
    logits = torch.randn(TOKENS, 11)
    results = []
    for options in ({}, {"routing_map_format": "bitmap_u8"}, {"topk_indices": torch.empty(TOKENS, 3).long()}):
        leaf = logits.clone().requires_grad_()
        probs, routing = router.fused_topk_with_score_function(leaf, *arguments, **options)
        probs.square().sum().backward()
        results.append((probs.detach(), routing, leaf.grad))
    (probs, mask, grad), (bits_probs, bits, bits_grad), (dense_probs, dense, dense_grad) = results
    unpacked = [[bool(bits[t, e // 8] & 1 << e % 8) for e in range(11)] for t in range(TOKENS)]
    assert bits.dtype == torch.uint8 and torch.tensor(unpacked).equal(mask)
    assert torch.zeros_like(mask).scatter(1, dense, True).equal(mask)
    assert probs.equal(bits_probs) and probs.equal(dense_probs)
    assert grad.equal(bits_grad) and grad.equal(dense_grad)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_load_balancing_loss_matches_formula(te, function):
    """Scores and loss equal their formulas, gradients equal autograd's. The number of tokens may be a tensor."""
    from transformer_engine.pytorch import router

    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    exact = logits.detach().double().requires_grad_()
    mask, scores = router.fused_compute_score_for_moe_aux_loss(logits, 2, function)
    all_experts = (EXPERTS, False, None, None, None, function, None)
    expected = _probabilities(exact, *all_experts)[0]
    assert scores.dtype == torch.float32 and ref.distance(scores, expected) <= FP32
    assert torch.equal(mask, torch.zeros_like(mask).scatter(1, expected.topk(2).indices, True))
    counts = mask.sum(0)
    loss = router.fused_moe_aux_loss(scores, counts, TOKENS, EXPERTS, 2, 0.1)
    same = router.fused_moe_aux_loss(scores, counts, torch.tensor(TOKENS), EXPERTS, 2, 0.1)
    plain = (expected.sum(0) * counts).sum() * EXPERTS * 0.1 / 2 / TOKENS**2
    assert torch.equal(loss, same) and ref.distance(loss, plain) <= FP32
    loss.backward()
    plain.backward()
    assert ref.distance(logits.grad, exact.grad) <= FP32


def _routing(topk=2):
    mask = torch.zeros(TOKENS, EXPERTS, dtype=torch.int32)
    return mask.scatter(1, torch.rand(TOKENS, EXPERTS).topk(topk).indices, 1)


def _sorted_rows(mask):
    """Return tokens of the permuted rows: expert by expert, in the order of the tokens."""
    return torch.cat([mask[:, expert].nonzero()[:, 0] for expert in range(EXPERTS)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_permutation_by_mask_matches_indexing(te, dtype):
    """Cover rows, probabilities, the weighted unpermutation, and all gradients."""
    mask, probs = _routing(), torch.rand(TOKENS, EXPERTS, requires_grad=True)
    tokens = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    order, experts = _sorted_rows(mask), mask.T.nonzero()[:, 0]
    rows, permuted, row_map = te.moe_permute_with_probs(tokens, probs, mask, len(order))
    assert torch.equal(rows, tokens[order]) and torch.equal(permuted, probs[order, experts])
    assert not torch.equal(rows, tokens[order.flip(0)])
    back = te.moe_unpermute(rows * 2, row_map, merging_probs=probs, restore_shape=tokens.shape)
    exact, exact_probs = (item.detach().double().requires_grad_() for item in (tokens, probs))
    plain = (2 * exact[:, None] * (exact_probs * mask)[..., None]).sum(1)
    unit = FP32 if dtype == torch.float32 else 2**-7
    assert ref.distance(back, plain) <= unit
    weights, of_rows = torch.randn(TOKENS, HIDDEN), torch.randn(len(order))
    ((back * weights).sum() + (permuted * of_rows).sum()).backward()
    ((plain * weights).sum() + (exact_probs[order, experts] * of_rows).sum()).backward()
    assert ref.distance(tokens.grad, exact.grad) <= unit
    assert ref.distance(probs.grad, exact_probs.grad) <= unit


def test_padded_permutation_is_zero_padded_and_invertible(te):
    """Groups of rows are padded with zeros to a multiple. Unpermutation ignores the padding."""
    mask, probs = _routing(), torch.rand(TOKENS, EXPERTS)
    tokens, counts = torch.randn(TOKENS, HIDDEN), mask.sum(0)
    result = te.moe_permute_and_pad_with_probs(tokens, probs, mask, counts, 4)
    rows, permuted, row_map, offsets, padded = result
    assert padded.tolist() == [-(-int(count) // 4) * 4 for count in counts] and len(rows) == padded.sum()
    starts = (padded.cumsum(0) - padded).tolist()
    for expert, start in enumerate(starts):
        own = mask[:, expert].nonzero()[:, 0]
        assert torch.equal(rows[start : start + len(own)], tokens[own])
        assert not rows[start + len(own) : start + int(padded[expert])].any()
    back = te.moe_unpermute(
        rows, row_map, merging_probs=probs, restore_shape=tokens.shape, pad_offsets=offsets
    )
    assert ref.distance(back, tokens * (probs * mask).sum(1, keepdim=True)) <= FP32
    assert ref.distance(permuted.sum(), (probs * mask).sum()) <= FP32


@pytest.mark.parametrize("kept", [0, 15])
def test_permutation_by_index_matches_indexing(te, kept):
    """Rows are sorted by expert, and unpermutation sums them with weights. Rows above the limit are dropped."""
    index = torch.rand(TOKENS, EXPERTS).topk(2).indices.to(torch.int32)
    tokens = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    probs = torch.rand(TOKENS, 2, requires_grad=True)
    rows, row_map = te.moe_permute(tokens, index, kept, map_type="index")
    order = index.flatten().sort(stable=True).indices[: kept or None]
    assert torch.equal(rows, tokens[order // 2])
    used = torch.zeros(TOKENS * 2).index_fill(0, order, 1.0).view(TOKENS, 2)
    back = te.moe_unpermute(rows, row_map, merging_probs=probs, map_type="index")
    exact, exact_probs = (item.detach().double().requires_grad_() for item in (tokens, probs))
    plain = exact * (exact_probs * used).sum(1, keepdim=True)
    assert ref.distance(back, plain) <= FP32
    weights = torch.randn(TOKENS, HIDDEN)
    (back * weights).sum().backward()
    (plain * weights).sum().backward()
    assert ref.distance(tokens.grad, exact.grad) <= FP32
    assert ref.distance(probs.grad, exact_probs.grad) <= FP32


def test_chunk_sort_moves_rows_probabilities_and_gradients(te):
    """Chunks move with their probabilities, and their gradients move back."""
    sizes, order = torch.tensor([3, 0, 5, 4]), torch.tensor([2, 0, 3, 1])
    tokens, probs = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.rand(TOKENS)
    chunks = torch.arange(TOKENS).split(sizes.tolist())
    moved = torch.cat([chunks[i] for i in order])
    result, found_probs = te.moe_sort_chunks_by_index_with_probs(tokens, probs, sizes, order)
    assert torch.equal(result, tokens[moved]) and torch.equal(found_probs, probs[moved])
    weights = torch.randn(TOKENS, HIDDEN)
    (result * weights).sum().backward()
    assert torch.equal(tokens.grad[moved], weights)
