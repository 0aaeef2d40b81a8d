"""The batcher's promises: prefixes, partial answers, version spans, memory, independence of the batch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from schemas.errors import EngineError
from services.rollout.reference.batcher import Batcher
from services.rollout.reference.model import Qwen3, flatten
from services.rollout.reference.request import Request, RequestRefused, Span, StopTexts

MakeBatcher = Callable[..., Batcher]
Answer = tuple[list[int], list[float]]


def ids(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, 96) for _ in range(count)]


def ask(rid: str = "a", prompt: list[int] | None = None, *, new: int = 20, **more: object) -> Request:
    return Request(rid=rid, input_ids=ids(0, 40) if prompt is None else prompt, max_new_tokens=new, **more)  # type: ignore[arg-type]


def drain(batcher: Batcher) -> dict[str, Request]:
    """Step until nothing is left; the finished requests by rid."""
    finished = {}
    while batcher.busy:
        for request in batcher.step():
            assert request.rid not in finished, "a request finishes once"
            finished[request.rid] = request
        batcher.check()
    return finished


def run(batcher: Batcher, *requests: Request) -> list[Answer]:
    for request in requests:
        batcher.submit(request)
    finished = drain(batcher)
    return [(finished[request.rid].output_ids, finished[request.rid].logprobs) for request in requests]


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_logprobs_are_those_of_the_full_pass(model: Qwen3, make_batcher: MakeBatcher, temperature: float) -> None:
    request = ask(new=30, temperature=temperature)
    [(output, logprobs)] = run(make_batcher(), request)
    with torch.no_grad():
        logits = model(torch.tensor([request.tokens]))[0, request.prompt_tokens - 1 : -1].double()
    expected = torch.log_softmax(logits / (temperature or 1.0), dim=-1)[torch.arange(30), output]
    assert torch.allclose(torch.tensor(logprobs, dtype=torch.float64), expected, atol=1e-4)
    if not temperature:
        assert output == logits.argmax(-1).tolist()


def test_a_stop_id_ends_the_answer_and_is_part_of_it(make_batcher: MakeBatcher) -> None:
    free = run(make_batcher(), ask())[0][0]
    stop = free[7]
    request = ask(stop_ids=frozenset({stop}))
    [(output, logprobs)] = run(make_batcher(), request)
    assert output == free[: free.index(stop) + 1]
    assert len(logprobs) == len(output)
    assert request.answer(return_logprob=True)["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_text_ends_the_answer_at_the_id_that_completes_it(make_batcher: MakeBatcher, length: int) -> None:
    def text(ids: list[int]) -> str:
        return "".join(chr(32 + token) for token in ids)

    free = run(make_batcher(), ask())[0][0]
    stop = text(free)[9 : 9 + length]
    request = ask(stop_texts=StopTexts(["no such text", stop], text))
    [(output, logprobs)] = run(make_batcher(), request)
    assert text(output) == text(free)[: text(free).index(stop) + length]
    assert len(logprobs) == len(output)
    assert request.answer(return_logprob=True)["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_an_answer_has_sglangs_shape(make_batcher: MakeBatcher) -> None:
    request = ask(new=3)
    [(output, logprobs)] = run(make_batcher(), request)
    assert request.answer(return_logprob=True) == {
        "output_ids": output,
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 40,
            "completion_tokens": 3,
            "cached_tokens": 0,
            "num_retractions": 0,
            "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": 3}],
            "output_token_logprobs": [[logprobs[i], output[i], None] for i in range(3)],
        },
    }


def test_a_reused_prefix_gives_the_same_tokens(make_batcher: MakeBatcher) -> None:
    batcher = make_batcher(dtype=torch.float64)
    first = run(batcher, ask("first", seed=1))[0]
    turn = [*ids(0, 40), *first[0], *ids(1, 9)]
    continued = ask("second", turn, seed=2)
    second = run(batcher, continued)[0]
    assert continued.cached_tokens == (40 + 20 - 1) // 16 * 16, "the answer itself is in the cache too"
    assert second == run(make_batcher(dtype=torch.float64), ask("fresh", turn, seed=2))[0]


def test_in_float64_an_answer_does_not_depend_on_the_batch(make_batcher: MakeBatcher) -> None:
    prompts = [ids(seed, length) for seed, length in enumerate((1, 15, 16, 17, 33, 64, 90, 17))]
    alone = [
        run(make_batcher(dtype=torch.float64), ask(f"r{i}", prompt, new=40, seed=i))[0]
        for i, prompt in enumerate(prompts)
    ]
    crowded = make_batcher(dtype=torch.float64, kv_tokens=160, max_running=5, prefill_tokens=56)
    together = run(crowded, *(ask(f"r{i}", prompt, new=40, seed=i) for i, prompt in enumerate(prompts)))
    assert crowded.retractions, "the small pool must have forced some requests out"
    assert together == alone, "bit for bit"


def test_in_float32_batching_changes_rounding_only(make_batcher: MakeBatcher) -> None:
    prompts = [ids(seed, length) for seed, length in enumerate((1, 15, 64, 90))]
    alone = [run(make_batcher(), ask(f"r{i}", p, temperature=0.0))[0] for i, p in enumerate(prompts)]
    together = run(make_batcher(), *(ask(f"r{i}", p, temperature=0.0) for i, p in enumerate(prompts)))
    for one, other in zip(alone, together, strict=True):
        assert one[0] == other[0]
        assert one[1] == pytest.approx(other[1], abs=1e-4)


def test_the_seed_decides_and_a_missing_one_comes_from_the_rid(make_batcher: MakeBatcher) -> None:
    a, same, b, by_rid = run(make_batcher(), ask("a", seed=1), ask("b", seed=1), ask("c", seed=2), ask("d"))
    assert a[0] == same[0] != b[0]
    assert run(make_batcher(), ask("d"))[0][0] == by_rid[0] != a[0]


def test_requests_join_and_leave_at_every_step(make_batcher: MakeBatcher) -> None:
    batcher = make_batcher(max_running=2)
    for rid, new in (("long", 9), ("short", 2), ("late", 2)):
        batcher.submit(ask(rid, ids(1, 5), new=new))
    seen = []
    while batcher.busy:
        done = [request.rid for request in batcher.step()]
        seen.append(([request.rid for request in batcher.running], done))
    assert seen[0] == (["long"], ["short"]), (
        "a prompt is sampled from in the step that computes it, and again in the same"
    )
    assert seen[1] == (["long"], ["late"])
    assert seen[-1] == ([], ["long"])


def test_an_abort_returns_what_was_sampled(make_batcher: MakeBatcher) -> None:
    batcher = make_batcher()
    for rid in ("ep-1", "ep-10", "ex-1"):
        batcher.submit(ask(rid, new=100))
    for _ in range(5):
        batcher.step()
    ended = batcher.abort("ep-1")
    assert [request.rid for request in ended] == ["ep-1", "ep-10"], "a rid is a prefix"
    answer = ended[0].answer(return_logprob=True)
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort before finishing"}
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] == 6
    assert answer["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    assert batcher.abort("") == batcher.abort("nobody") == batcher.abort("ex", exact=True) == []
    batcher.check()
    assert [request.rid for request in batcher.abort(everything=True)] == ["ex-1"]
    assert not batcher.busy


def test_new_weights_in_mid_request_give_two_spans_and_fresh_keys(
    model: Qwen3, other_model: Qwen3, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(dtype=torch.float64)
    request = ask(new=20)
    batcher.submit(request)
    while request.sampled < 8:
        batcher.step()
    assert batcher.set_weights(flatten(other_model), "1") == 1
    assert batcher.pool.cached == 0
    drain(batcher)
    assert request.spans == [Span(version="0", start=0, end=8), Span(version="1", start=8, end=20)]
    assert (request.weight_version, request.retractions) == ("1", 1)
    for source, span in zip((model, other_model), request.spans, strict=True):
        with torch.no_grad():
            logits = source(torch.tensor([request.tokens]))[0, request.prompt_tokens - 1 : -1].double()
        expected = torch.log_softmax(logits, dim=-1)[torch.arange(20), request.output_ids]
        window = slice(span.start, span.end)
        assert request.logprobs[window] == pytest.approx(expected[window].tolist(), abs=1e-3), span


def test_a_buffer_that_does_not_fit_changes_nothing(make_batcher: MakeBatcher) -> None:
    batcher = make_batcher()
    batcher.submit(ask())
    batcher.step()
    with pytest.raises(EngineError, match="this model needs"):
        batcher.set_weights(torch.zeros(3), "1")
    assert (batcher.weight_version, len(batcher.running)) == ("0", 1)


def test_weights_that_give_no_finite_logits_end_requests_with_an_error(model: Qwen3, make_batcher: MakeBatcher) -> None:
    batcher = make_batcher()
    batcher.set_weights(torch.full_like(flatten(model), float("nan")), "bad")
    request = ask()
    run(batcher, request)
    assert request.finish is not None
    assert (request.finish.status_code, request.output_ids) == (500, [])
    assert "version bad" in (request.finish.message or "")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_keeps_requests_and_they_go_on_alike(make_batcher: MakeBatcher, mode: str) -> None:
    undisturbed = run(make_batcher(dtype=torch.float64), ask())[0]
    batcher = make_batcher(dtype=torch.float64)
    request = ask()
    batcher.submit(request)
    batcher.step()
    batcher.pause(mode)  # type: ignore[arg-type]
    assert (len(batcher.running), len(batcher.waiting)) == ((0, 1) if mode == "retract" else (1, 0))
    assert not batcher.busy and batcher.step() == []
    batcher.resume()
    drain(batcher)
    assert (request.output_ids, request.logprobs) == undisturbed


def test_a_pause_that_aborts_ends_everything_and_new_requests_wait(make_batcher: MakeBatcher) -> None:
    batcher = make_batcher()
    batcher.submit(ask("a"))
    batcher.step()
    assert [request.rid for request in batcher.pause("abort")] == ["a"]
    batcher.submit(ask("b"))
    assert repr(batcher).startswith("<Batcher paused abort version 0: 0 running, 1 waiting,")
    batcher.resume()
    assert list(drain(batcher)) == ["b"]


def test_memory_is_really_freed_and_requests_survive_it(other_model: Qwen3, make_batcher: MakeBatcher) -> None:
    batcher = make_batcher(dtype=torch.float64)
    request = ask(new=20)
    batcher.submit(request)
    for _ in range(8):
        batcher.step()
    with pytest.raises(RequestRefused, match="pause generation first"):
        batcher.release_memory(["kv_cache"])
    before = (batcher.decoder.weight_bytes, batcher.decoder.kv_bytes)
    batcher.pause("in_place")
    batcher.release_memory(["weights", "kv_cache"])
    assert (batcher.decoder.weight_bytes, batcher.decoder.kv_bytes) == (0, 0)
    batcher.resume()
    assert batcher.step() == [] and not batcher.ready
    with pytest.raises(EngineError, match="resume the memory"):
        batcher.set_weights(flatten(other_model), "1")
    batcher.resume_memory(["weights"])
    batcher.resume_memory(["kv_cache"])
    assert (batcher.decoder.weight_bytes, batcher.decoder.kv_bytes) == before
    assert not batcher.ready, "the weights that came back hold nothing yet"
    batcher.set_weights(flatten(other_model), "1")
    drain(batcher)
    assert [span.version for span in request.spans] == ["0", "1"]
    with pytest.raises(RequestRefused, match="not released"):
        batcher.resume_memory(["weights"])
    with pytest.raises(RequestRefused, match="unknown memory tags"):
        batcher.release_memory(["cuda_graph"])


def test_what_can_never_be_served_is_refused_at_once(make_batcher: MakeBatcher) -> None:
    batcher = make_batcher(kv_tokens=64)
    for request, said in (
        (ask(prompt=[]), "empty"),
        (ask(prompt=[1] * 50, new=15), "Requested token count exceeds"),
        (ask(prompt=[96], new=1), "outside 0 .. 95"),
    ):
        with pytest.raises(RequestRefused, match=said):
            batcher.submit(request)
    batcher.submit(ask("twice", [1], new=63))
    with pytest.raises(RequestRefused, match="in use"):
        batcher.submit(ask("twice", [1], new=1))
    drain(batcher)
    batcher.submit(ask("twice", [1], new=1))


def test_the_cache_is_flushed_only_when_nothing_runs(make_batcher: MakeBatcher) -> None:
    batcher = make_batcher()
    batcher.submit(ask())
    batcher.step()
    with pytest.raises(RequestRefused, match="1 running"):
        batcher.flush()
    drain(batcher)
    assert batcher.pool.cached == 3
    batcher.flush()
    assert batcher.pool.free == batcher.pool.num_blocks


@pytest.mark.parametrize("seed", range(6))
def test_nothing_leaks_under_random_traffic(other_model: Qwen3, make_batcher: MakeBatcher, seed: int) -> None:
    draw = random.Random(seed)
    batcher = make_batcher(kv_tokens=240, max_running=4, prefill_tokens=24)
    live: dict[str, Request] = {}
    ended: list[Request] = []
    for turn in range(120):
        match draw.choice(("submit", "submit", "step", "step", "step", "abort", "pause", "weights", "memory")):
            case "submit":
                prompt = ids(draw.randrange(3), 32)[: draw.randrange(1, 33)] + ids(turn, draw.randrange(1, 20))
                request = ask(f"r{turn:03d}", prompt, new=draw.randrange(1, 40))
                batcher.submit(request)
                live[request.rid] = request
            case "step":
                ended += batcher.step()
            case "abort" if live:
                ended += batcher.abort(draw.choice(sorted(live)), exact=True)
            case "pause":
                ended += batcher.pause(draw.choice(("abort", "retract", "in_place", "in_place")))
                batcher.resume()
            case "weights":
                batcher.set_weights(flatten(other_model), str(turn))
            case "memory":
                batcher.pause("in_place")
                batcher.release_memory(["kv_cache"])
                batcher.resume_memory(["kv_cache"])
                batcher.resume()
        batcher.check()
        for request in ended:
            live.pop(request.rid, None)
    ended += drain(batcher).values()
    assert len(ended) == len({request.rid for request in ended})
    for request in ended:
        assert request.finish is not None
        assert len(request.output_ids) == len(request.logprobs)
        assert [span.start for span in request.spans] == [0, *(span.end for span in request.spans[:-1])][
            : len(request.spans)
        ]
        assert (request.spans[-1].end if request.spans else 0) == request.sampled
    assert batcher.pool.available == batcher.pool.num_blocks
