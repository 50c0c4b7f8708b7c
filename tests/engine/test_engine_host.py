from __future__ import annotations

from collections.abc import Collection

import pytest

from jaxinfer.engine.engine import Engine, EngineError
from jaxinfer.engine.outputs import LOGPROB_FLOOR, Delta
from jaxinfer.schedule.request import RequestRefused
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.engine.fakes import EOS, TableTokenizer, make_engine


def ids(text: str) -> list[int]:
    return list(text.encode("ascii"))


def stream(engine: Engine, prompt="p", params: SamplingParams | None = None) -> list[Delta]:
    return list(engine.stream(engine.submit(prompt, params, stream=True)))


def both(script, params: SamplingParams, tokenizer=None, prompt="p", **limits):
    """The same request streamed and whole: both must tell the same; returns the whole one's only choice."""
    deltas = stream(make_engine(script, tokenizer, **limits)[0], prompt, params)
    engine, _ = make_engine(script, tokenizer, **limits)
    (output,) = engine.generate([prompt], params)
    (choice,) = output.outputs
    assert "".join(delta.text for delta in deltas) == choice.text
    assert [token for delta in deltas for token in delta.token_ids] == choice.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [choice.finish_reason]
    assert deltas[-1].stop_reason == choice.stop_reason
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert engine.scheduler.pool.num_used == 0
    return choice


def test_plans_are_dispatched_before_the_tokens_of_the_last_one_are_read():
    engine, runner = make_engine(ids("abc"))
    (output,) = engine.generate(["hi"], SamplingParams(max_tokens=3))
    assert output.outputs[0].text == "abc"
    assert output.prompt_token_ids == ids("hi")
    order = [
        ("dispatch", 0),
        ("dispatch", 1),
        ("collect", 0),
        ("dispatch", 2),
        ("collect", 1),
        ("collect", 2),
    ]
    assert runner.events == order


TRAP_1 = {
    200: b"a\xc3",
    201: b"\xa9\xe6\xbc",
    202: b"\xa2\xf0\x9f",
    203: b"\x99\x82\xf0",
    204: b"\x9f\x99\x82b",
}


def test_trap_01_characters_over_several_tokens_arrive_whole():
    choice = both([*TRAP_1], SamplingParams(max_tokens=5), TableTokenizer(TRAP_1))
    assert choice.text == "aé漢🙂🙂b"


@pytest.mark.parametrize(
    ("pieces", "text"),
    [([b" Hello", b" world", b"!"], " Hello world!"), ([b" in the", b" house"], " in the house")],
)
def test_trap_02_the_space_before_the_first_word_is_kept(pieces: list[bytes], text: str):
    table = {200 + i: piece for i, piece in enumerate(pieces)}
    params = SamplingParams(max_tokens=len(pieces))
    assert both([*table], params, TableTokenizer(table, strips_space=True), "Say:").text == text


TRAP_3 = {200: b"QRS", 201: b"T", 202: b"UV", 203: b"WX", 204: b"!"}


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abQRSTUVW")])
def test_trap_03_a_stop_string_over_tokens_is_never_seen(include: bool, text: str, num_steps: int):
    params = SamplingParams(max_tokens=20, stop=["QRSTUVW"], include_stop_str_in_output=include)
    script = [*ids("ab"), 200, 201, 202, 203, 204, 204]
    choice = both(script, params, TableTokenizer(TRAP_3), num_decode_steps=num_steps)
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, "stop", "QRSTUVW")
    assert choice.token_ids == script[:6]  # what completed the stop string is counted, what came after is not


@pytest.mark.parametrize(("script", "reason"), [([200, 201, 204], "length"), ([200, 201, 204, EOS], "stop")])
def test_trap_03_what_only_began_like_a_stop_string_is_sent(script: list[int], reason: str):
    params = SamplingParams(max_tokens=3 if reason == "length" else 9, stop=["QRSTUVW"])
    choice = both(script, params, TableTokenizer(TRAP_3))
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("QRST!", reason, None)


def test_what_is_held_back_comes_out_in_order_at_the_end():
    table = {200: b"x\xf0\x9f"}
    engine, _ = make_engine([*ids("aST"), 200], TableTokenizer(table))
    (output,) = engine.generate(["p"], SamplingParams(max_tokens=4, stop=["STx?"]))
    assert output.outputs[0].text == "aSTx\ufffd"


@pytest.mark.parametrize("stop", ["", [""], ["", "zzz"]])
def test_trap_04_an_empty_stop_string_is_refused(stop: str | list[str]):
    with pytest.raises(ValueError, match="stop"):
        SamplingParams(stop=stop, max_tokens=8)


@pytest.mark.parametrize("num_steps", [1, 8])
def test_trap_05_every_end_token_of_the_model_ends(num_steps: int):
    params = SamplingParams(max_tokens=8, temperature=0)
    choice = both([10, 11, 7, 12, 13], params, eos_ids=(3, 7), num_decode_steps=num_steps)
    assert (choice.token_ids, choice.text) == ([10, 11, 7], "<10><11>")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


def test_trap_06_one_token_is_one_token():
    choice = both(ids("abc"), SamplingParams(max_tokens=1))
    assert (choice.token_ids, choice.finish_reason) == (ids("a"), "length")


def test_trap_11_usage_is_right_when_the_prompt_runs_in_chunks():
    engine, runner = make_engine(ids("ab"), prefill_chunk=64)
    handle = engine.submit([5] * 900, SamplingParams(max_tokens=1), stream=True)
    (delta,) = engine.stream(handle)
    assert delta.token_ids == ids("a")
    assert len(handle.output().prompt_token_ids) == 900
    assert (engine.metrics.prompt_tokens, engine.metrics.output_tokens) == (900, 1)
    assert len([event for event in runner.events if event[0] == "collect"]) == 15


def test_trap_13_an_end_in_the_middle_of_a_block_ends_there():
    choice = both([*ids("abcd"), EOS, *ids("xyz")], SamplingParams(max_tokens=40), num_decode_steps=8)
    assert (choice.text, choice.token_ids) == ("abcd", [*ids("abcd"), EOS])


def test_trap_16_preemption_repeats_and_loses_nothing():
    scripts = {str(i): [32 + (i * 7 + j) % 90 for j in range(200)] for i in range(4)}
    engine, runner = make_engine(lambda name, _: scripts[name], num_pages=28, max_num_batched_tokens=64)
    params = SamplingParams(max_tokens=200, logprobs=1, seed=5)
    handles = [engine.submit([7] * 16, params, request_id=name, stream=True) for name in scripts]
    engine.run_until_done()
    assert engine.scheduler.num_preemptions > 0
    for handle in handles:
        output = handle.output()
        (choice,) = output.outputs
        assert choice.token_ids == scripts[handle.request_id]
        assert (
            "".join(delta.text for delta in handle.deltas) == choice.text == bytes(choice.token_ids).decode()
        )
        assert choice.logprobs is not None
        assert len(choice.logprobs) == 200
        assert choice.cumulative_logprob == pytest.approx(-sum(choice.token_ids) / 10, rel=1e-4)
        assert len(output.prompt_token_ids) == 16
    assert {(admission.prompt_len, admission.seed) for admission in runner.admitted} == {(16, 5)}


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_stop_token_ids(include: bool, text: str):
    params = SamplingParams(max_tokens=9, stop_token_ids=[ord("c")], include_stop_str_in_output=include)
    choice = both(ids("abcde"), params)
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, "stop", ord("c"))
    assert choice.token_ids == ids("abc")


@pytest.mark.parametrize(("skip", "text"), [(True, "abcd"), (False, "ab</s>cd")])
def test_ignore_eos_and_skip_special_tokens(skip: bool, text: str):
    params = SamplingParams(max_tokens=5, ignore_eos=True, skip_special_tokens=skip)
    choice = both([*ids("ab"), EOS, *ids("cd")], params)
    assert (choice.text, choice.finish_reason) == (text, "length")


def test_min_tokens_keeps_a_stop_string_from_ending_too_soon():
    choice = both(ids("--ab--cd"), SamplingParams(max_tokens=8, min_tokens=3, stop=["--"]))
    assert (choice.text, choice.token_ids) == ("--ab", ids("--ab--"))


def test_text_is_left_out_when_it_is_not_wanted():
    choice = both(ids("abc"), SamplingParams(max_tokens=3, detokenize=False))
    assert (choice.text, choice.token_ids) == ("", ids("abc"))


def test_n_choices_of_one_prompt_run_apart():
    engine, runner = make_engine(lambda _, choice: ids("abc"[choice]) + ids("xyz"[: choice + 1]) + [EOS])
    (output,) = engine.generate(["hi"], SamplingParams(n=3, max_tokens=9, seed=4, prompt_logprobs=0))
    assert [(one.index, one.text) for one in output.outputs] == [(0, "ax"), (1, "bxy"), (2, "cxyz")]
    assert [(one.choice, one.seed) for one in runner.admitted] == [(0, 4), (1, 4), (2, 4)]
    assert [one.params.prompt_logprobs for one in runner.admitted] == [0, None, None]
    assert output.prompt_logprobs is not None
    assert engine.metrics.prompt_tokens == 2
    assert engine.metrics.output_tokens == sum(len(one.token_ids) for one in output.outputs)


def test_a_request_without_a_seed_draws_one_that_its_choices_share():
    engine, runner = make_engine(ids("a"))
    engine.generate(["x", "y"], SamplingParams(n=2, max_tokens=1))
    seeds = [one.seed for one in runner.admitted]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


@pytest.mark.parametrize(("count", "others"), [(0, []), (2, [0, 1])])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_logprobs_hold_the_token_and_the_likeliest(count: int, others: list[int], num_steps: int):
    choice = both(ids("abcdef"), SamplingParams(max_tokens=6, logprobs=count), num_decode_steps=num_steps)
    assert choice.logprobs is not None
    assert [list(entry) for entry in choice.logprobs] == [[token, *others] for token in ids("abcdef")]
    first = choice.logprobs[0][ord("a")]
    assert (first.logprob, first.rank, first.decoded_token) == (pytest.approx(-9.7), 97, "a")
    assert [choice.logprobs[0][other].rank for other in others] == [other + 1 for other in others]
    assert choice.cumulative_logprob == pytest.approx(-sum(ids("abcdef")) / 10)


def test_a_row_reads_its_own_count_of_logprobs_and_a_token_among_the_likeliest_once():
    engine, _ = make_engine(lambda name, _: [1, 1])
    outputs = engine.generate(
        ["x", "y", "z"], [SamplingParams(max_tokens=2, logprobs=k) for k in (3, None, 1)]
    )
    counts = [
        one.outputs[0].logprobs and [list(entry) for entry in one.outputs[0].logprobs] for one in outputs
    ]
    assert counts == [[[1, 0, 2]] * 2, None, [[1, 0]] * 2]
    entries = outputs[0].outputs[0].logprobs
    assert entries is not None
    assert entries[0][1].rank == 1  # the token's own, not its place in the list


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_trap_10_logprobs_are_finite(value: float):
    engine, runner = make_engine(ids("ab"))
    runner.chosen = lambda token: value
    (output,) = engine.generate(["p"], SamplingParams(max_tokens=2, logprobs=0))
    assert output.outputs[0].logprobs is not None
    assert output.outputs[0].logprobs[0][ord("a")].logprob == LOGPROB_FLOOR


@pytest.mark.parametrize("chunk", [3, 100])
def test_prompt_logprobs_are_the_same_in_chunks_and_whole(chunk: int):
    engine, _ = make_engine(ids("ab"), prefill_chunk=chunk)
    (output,) = engine.generate(["question"], SamplingParams(max_tokens=2, prompt_logprobs=1))
    first, *entries = output.prompt_logprobs or []
    assert first is None
    assert [entry and list(entry) for entry in entries] == [[token, 0] for token in ids("uestion")]
    assert entries[0] is not None
    assert entries[0][ord("u")].logprob == pytest.approx(-ord("u") / 10)


def test_abort_mid_stream_keeps_what_came():
    engine, _ = make_engine(lambda name, _: ids("abcdefgh"))
    handle = engine.submit("p", SamplingParams(max_tokens=8, stop=["bX"]), request_id="r", stream=True)
    other = engine.submit("p", SamplingParams(max_tokens=8))
    engine.step()
    while not handle.deltas or handle.deltas[-1].token_ids != ids("b"):
        engine.step()
    engine.abort("r")
    deltas = list(engine.stream(handle))
    assert "".join(delta.text for delta in deltas) == "ab"  # the held "b" is let out
    assert deltas[-1].finish_reason == "abort"
    engine.run_until_done()
    assert not engine._rows  # nothing of what ended is kept
    assert not engine._handles
    assert handle.output().outputs[0].token_ids == ids("ab")
    assert other.output().outputs[0].text == "abcdefgh"
    assert engine.scheduler.pool.num_used == 0
    assert engine.metrics.finished == {"abort": 1, "length": 1}


def test_leaving_a_stream_early_aborts_and_its_name_is_free_at_once():
    engine, _ = make_engine(ids("abcdefgh"))
    deltas = engine.stream(engine.submit("p", SamplingParams(max_tokens=8), request_id="r", stream=True))
    next(deltas)
    deltas.close()
    engine.step()
    again = engine.submit("q", SamplingParams(max_tokens=3), request_id="r")
    engine.run_until_done()
    assert again.output().outputs[0].text == "abc"
    engine.abort("r")
    engine.abort("nobody")
    engine.run_until_done()
    assert not engine.has_work


def test_abort_ends_every_choice():
    engine, _ = make_engine(ids("abcdefgh"), max_num_seqs=2)
    handle = engine.submit("p", SamplingParams(n=3, max_tokens=8), request_id="r")
    engine.step()
    engine.abort("r")
    engine.step()
    assert handle.finished
    assert {one.finish_reason for one in handle.output().outputs} == {"abort"}
    engine.run_until_done()
    assert engine.scheduler.pool.num_used == 0


def test_an_error_in_one_request_ends_that_one_only():
    engine, _ = make_engine(lambda name, _: [97, 666, 98, 98] if name == "bad" else ids("good"))
    bad = engine.submit("p", SamplingParams(max_tokens=4), request_id="bad", stream=True)
    good = engine.submit("p", SamplingParams(max_tokens=4), request_id="fine", stream=True)
    engine.run_until_done()
    assert good.output().outputs[0].text == "good"
    (choice,) = bad.output().outputs
    assert (choice.finish_reason, choice.text) == ("error", "a")
    assert choice.error == "KeyError: 'no such piece'"
    assert bad.deltas[-1].error == choice.error
    assert engine.scheduler.pool.num_used == 0


def test_logprobs_that_the_step_did_not_bring_end_that_request_only():
    engine, runner = make_engine(ids("good"))
    runner._logprobs = lambda tokens: None  # type: ignore[method-assign]
    outputs = engine.generate(
        ["p", "p"], [SamplingParams(max_tokens=4, logprobs=1), SamplingParams(max_tokens=4)]
    )
    assert [one.outputs[0].finish_reason for one in outputs] == ["error", "length"]
    assert "logprobs were asked for" in (outputs[0].outputs[0].error or "")


def test_a_runner_that_fails_ends_all_in_flight_and_says_so():
    engine, runner = make_engine(ids("abcdefgh"))
    runner.fails = lambda plan: plan.step == 2
    handles = [engine.submit("p", SamplingParams(max_tokens=8), stream=True) for _ in range(2)]
    with pytest.raises(
        EngineError, match="all requests in flight ended with 'error': RuntimeError: the device is gone"
    ):
        engine.run_until_done()
    for handle in handles:
        (choice,) = handle.output().outputs
        assert (choice.text, choice.finish_reason) == ("ab", "error")
        assert choice.error == "RuntimeError: the device is gone"
        assert handle.deltas[-1].finish_reason == "error"
    assert not engine.has_work
    with pytest.raises(EngineError, match="takes no requests"):
        engine.submit("p")
    with pytest.raises(EngineError, match="failed earlier"):
        engine.step()


@pytest.mark.parametrize("prompt", ["", []])
def test_trap_32_an_empty_prompt_is_refused_at_the_door(prompt: str | list[int]):
    engine, _ = make_engine(ids("ab"))
    with pytest.raises(ValueError, match="no tokens"):
        engine.generate(["a", prompt], SamplingParams(max_tokens=2))
    assert not engine.has_work, "all or nothing"
    assert engine.generate(["a"], SamplingParams(max_tokens=2))[0].outputs[0].text == "ab"


def test_trap_32_an_empty_text_runs_from_the_token_that_begins_texts():
    engine, _ = make_engine(ids("ab"), TableTokenizer(bos=1))
    (output,) = engine.generate([""], SamplingParams(max_tokens=2))
    assert (output.prompt_token_ids, output.outputs[0].text) == ([1], "ab")


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([1, -1, 1000], {}, r"token ids \[-1, 1000\], allowed are 0 to 999"),
        ([1] * 64, {}, "prompt tokens: got 64"),
        ([1] * 40, {"max_tokens": None}, "need 4 pages, the pool has 3"),
        ([1], {"stop_token_ids": [1000]}, "stop_token_ids: got 1000"),
        ([1], {"min_tokens": 64, "max_tokens": None}, "min_tokens"),
    ],
)
def test_what_can_be_checked_is_checked_at_the_door(prompt: list[int], params: dict, words: str):
    engine, _ = make_engine(ids("ab"), num_pages=3, max_len=64)
    with pytest.raises(ValueError, match=words):
        engine.submit(prompt, SamplingParams(**params))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("draws", "params", "missing"),
    [
        (("greedy",), SamplingParams(temperature=0), None),
        (("sample",), SamplingParams(temperature=0), None),
        (("greedy",), SamplingParams(temperature=1), "sample"),
        (("greedy",), SamplingParams(temperature=0, logprobs=1), "sample"),
        (("greedy", "sample"), SamplingParams(temperature=0, prompt_logprobs=1), "score"),
    ],
)
def test_a_draw_that_the_run_does_not_serve_is_refused(
    draws: tuple[str, ...], params: SamplingParams, missing: str | None
):
    engine, _ = make_engine([EOS], draws=draws)
    if missing is None:
        engine.submit("a", params)
    else:
        with pytest.raises(RequestRefused, match=f"asks for {missing}"):
            engine.submit("a", params)


def test_a_name_in_use_is_refused():
    engine, _ = make_engine(ids("ab"))
    engine.submit("p", request_id="r")
    with pytest.raises(ValueError, match="request_id: 'r' is that of a live request"):
        engine.submit("q", request_id="r")
    engine.run_until_done()


def test_output_stops_where_the_context_ends():
    engine, _ = make_engine(ids("a"), max_len=20)
    (output,) = engine.generate([[5] * 12], SamplingParams(max_tokens=None))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (8, "length")


def test_bad_words_reach_the_device_as_ids():
    engine, runner = make_engine(ids("a"))
    engine.generate(["p"], SamplingParams(max_tokens=1, bad_words=["no", " off"], bad_words_ids=[[4]]))
    assert runner.admitted[0].params.bad_words_ids == ((4,), *map(tuple, map(ids, ("no", " no", " off"))))


def test_generate_keeps_the_order_and_tells_who_ends():
    engine, _ = make_engine(lambda name, _: ids("abcdefgh"))
    done: list[str] = []
    params = [SamplingParams(max_tokens=count) for count in (5, 1, 3)]
    outputs = engine.generate(
        ["x", "yy", "zzz"], params, on_finish=lambda handle: done.append(handle.prompt or "")
    )
    assert [(one.prompt, one.outputs[0].text) for one in outputs] == [
        ("x", "abcde"),
        ("yy", "a"),
        ("zzz", "abc"),
    ]
    assert done == ["yy", "zzz", "x"]
    with pytest.raises(ValueError, match="got 3 for 1 prompts"):
        engine.generate(["x"], params)


def test_more_requests_than_slots_all_end():
    engine, runner = make_engine(lambda name, _: ids(name[-1] * 3), max_num_seqs=2)
    handles = [engine.submit("p", SamplingParams(max_tokens=3), request_id=f"r{i}") for i in range(9)]
    engine.run_until_done()
    assert [handle.output().outputs[0].text for handle in handles] == [f"{i}" * 3 for i in range(9)]
    assert [one.request_id.split("/")[0] for one in runner.admitted] == [f"r{i}" for i in range(9)]


def test_an_abort_that_overtakes_its_request_is_ignored():
    """Two threads: one has named the request and not queued it yet when the other aborts it."""
    engine, _ = make_engine(ids("abc"))
    handle = engine.prepare("p", SamplingParams(max_tokens=3), request_id="mine")
    engine._handles["mine"] = handle
    engine.abort("mine")
    engine._inbox.append(handle)
    engine.run_until_done()
    assert handle.output().outputs[0].text == "abc"


def test_a_request_that_the_device_cannot_hold_is_refused_at_the_door():
    seen = []

    def check(params: SamplingParams, stop_ids: Collection[int]) -> None:
        seen.append(set(stop_ids))
        if len(stop_ids) > 2:
            raise ValueError("stop_token_ids: too many")

    engine, runner = make_engine(ids("abc"), check=check)
    with pytest.raises(ValueError, match="too many"):
        engine.generate(["a", "b"], [SamplingParams(), SamplingParams(stop_token_ids=[7, 8])])
    assert seen == [{EOS}, {EOS, 7, 8}]
    assert not engine.has_work
    assert runner.events == []


def test_an_error_of_on_finish_ends_the_other_requests():
    engine, _ = make_engine(ids("abc"))

    def fail(_) -> None:
        raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="own"):
        engine.generate(
            ["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=90)], on_finish=fail
        )
    engine.run_until_done()
    assert engine.metrics.finished == {"length": 1, "abort": 1}
    assert engine.scheduler.pool.num_used == 0


def test_prompts_that_meet_a_name_in_use_leave_its_owner_alone():
    engine, _ = make_engine(ids("abcdef"))
    owner = engine.submit("p", SamplingParams(max_tokens=6), request_id="request-1")
    with pytest.raises(ValueError, match="live request"):
        engine.generate(["x", "y"], SamplingParams(max_tokens=6))
    engine.run_until_done()
    assert owner.output().outputs[0].text == "abcdef"
    assert engine.metrics.finished["length"] == 1


@pytest.mark.parametrize("prompt", [[1.5, 2], ["a"], [None]])
def test_ids_that_are_no_integers_are_refused(prompt: list):
    with pytest.raises(ValueError, match="list of integers"):
        make_engine(ids("abc"))[0].submit(prompt)


def test_a_request_whose_logits_are_not_finite_ends_alone():
    engine, _ = make_engine(lambda name, _: [97, 98, -1] if name == "bad" else [97, 98, 99, 100])
    good = engine.submit("a", SamplingParams(max_tokens=4), request_id="good")
    bad = engine.submit("b", SamplingParams(max_tokens=4), request_id="bad", stream=True)
    engine.run_until_done()
    assert good.output().outputs[0].text == "abcd"
    (choice,) = bad.output().outputs
    assert (choice.text, choice.token_ids, choice.finish_reason) == ("ab", [97, 98], "error")
    assert "not finite" in (choice.error or "")
    assert bad.deltas[-1].error == choice.error
    assert engine.metrics.finished == {"length": 1, "error": 1}
