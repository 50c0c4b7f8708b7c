"""Texts cut into windows."""

import pytest

from jaxinfer.text.windows import cut_windows


@pytest.mark.parametrize("count", [1, 4, 5, 9])
@pytest.mark.parametrize("bos", [True, False])
def test_windows_hold_every_token_once_and_begin_as_the_text_does(count: int, bos: bool):
    ids = [*([0] if bos else []), *range(1, count + 1)]
    windows = cut_windows(ids, 4, bos_id=0)
    assert [token for window in windows for token in window if token] == list(range(1, count + 1))
    assert all((window[0] == 0) == bos for window in windows)
    assert max(map(len, windows)) <= 4 + bos
