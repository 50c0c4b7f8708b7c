"""Stop strings: held back, never lost, never sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.text import StopMatcher


def run(stops: list[str], pieces: list[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include_stop=include_stop)
    sent: list[str] = []
    for piece in pieces:
        result = matcher.push(piece)
        sent.append(result.emit)
        assert result.stopped == (result.matched is not None)
        if result.stopped:
            assert matcher.flush() == ""
            return sent, result.matched
    return [*sent, matcher.flush()], None


def first_match(stops: list[str], text: str) -> tuple[int, str] | None:
    """The oracle: read a character at a time, longest stop string first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end, stop
    return None


def test_trap_03_pieces_of_a_stop_string_are_held_back() -> None:
    assert run(["QRSTUVW"], ["QRS", "T", "UV", "WX"]) == (["", "", "", ""], "QRSTUVW")
    assert run(["QRSTUVW"], ["QRS", "T", "!"]) == (["", "", "QRST!", ""], None)


def test_trap_03_a_stop_string_may_end_within_a_token() -> None:
    assert run(["UVW"], ["ab", "cUV", "WX"], include_stop=True) == (["ab", "c", "UVW"], "UVW")
    assert run(["UVW"], ["abUVWXYZ"]) == (["ab"], "UVW")


def test_trap_04_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop: got an empty string"):
        StopMatcher(["x", ""])


def test_text_held_back_comes_out_at_the_end() -> None:
    assert run(["END"], ["abE", "N"]) == (["ab", "", "EN"], None)


def test_text_is_let_out_as_soon_as_it_cannot_be_a_stop_string() -> None:
    assert run(["aab"], ["aa", "a", "a", "c"]) == (["", "a", "a", "aac", ""], None)


def test_nothing_comes_after_a_stop_string() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", True, ".")
    assert matcher.push("more") == ("", True, ".")
    assert matcher.flush() == ""


def test_the_string_complete_first_wins_then_the_longest() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == (["a"], "bc")
    assert run(["cd", "bcd"], ["abcd"]) == (["a"], "bcd")


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert run([], ["a", "", "b"]) == (["a", "", "b", ""], None)


SHORT = st.text(alphabet="ab", min_size=1, max_size=4)


@given(
    stops=st.lists(SHORT, max_size=3),
    pieces=st.lists(st.text(alphabet="abc", max_size=4)),
    include=st.booleans(),
)
def test_equals_reading_a_character_at_a_time(stops: list[str], pieces: list[str], include: bool) -> None:
    text = "".join(pieces)
    sent, matched = run(stops, pieces, include_stop=include)
    found = first_match(stops, text)
    if found is None:
        assert (matched, "".join(sent)) == (None, text)
    else:
        end, stop = found
        assert (matched, "".join(sent)) == (stop, text[: end if include else end - len(stop)])


@given(stops=st.lists(SHORT, min_size=1, max_size=3), text=st.text(alphabet="abc", max_size=12))
def test_holds_back_no_more_than_a_beginning(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    result = matcher.push(text)
    held = matcher.flush()
    if not result.stopped:
        assert result.emit + held == text
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        longest = max((len(b) for b in beginnings if text.endswith(b)), default=0)
        assert len(held) == longest
