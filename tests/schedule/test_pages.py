from __future__ import annotations

import random

import pytest

from jaxinfer.schedule.pages import PagePool


def test_pages_are_handed_out_once_and_come_back():
    pool = PagePool(5, 16)
    first, second = pool.alloc(2), pool.alloc(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)
    pool.release(first)
    assert sorted(pool.alloc(2)) == sorted(first)


def test_a_shared_page_is_free_only_when_its_last_holder_lets_go():
    pool = PagePool(2, 4)
    (page,) = pool.alloc(1)
    pool.retain([page])
    pool.release([page])
    assert pool.num_free == 1
    pool.check_conserved([[page]])
    pool.release([page])
    assert pool.num_free == 2
    pool.check_conserved([])


def test_asking_for_more_than_is_free_takes_nothing():
    pool = PagePool(3, 4)
    pool.alloc(1)
    with pytest.raises(ValueError, match="asked for 3 pages, 2 of 3 are free"):
        pool.alloc(3)
    assert pool.num_free == 2


@pytest.mark.parametrize("page", [-1, 3, 100])
def test_trap_15_page_ids_out_of_range_are_refused(page: int):
    pool = PagePool(3, 4)
    pool.alloc(3)
    for act in (pool.release, pool.retain):
        with pytest.raises(ValueError, match=rf"page {page} is out of range, pages are 0\.\.2"):
            act([page])


def test_freeing_twice_or_retaining_a_free_page_is_an_error():
    pool = PagePool(2, 4)
    (page,) = pool.alloc(1)
    pool.release([page])
    for act in (pool.release, pool.retain):
        with pytest.raises(ValueError, match="free already"):
            act([page])


def test_conservation_names_the_leaked_and_the_overheld():
    pool = PagePool(3, 4)
    leaked, held = pool.alloc(2)
    with pytest.raises(RuntimeError, match=f"{leaked}: \\(1, 0\\), {held}: \\(1, 2\\)"):
        pool.check_conserved([[held], [held]])


@pytest.mark.parametrize(
    ("num_tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_pages_for(num_tokens: int, pages: int):
    assert PagePool(1, 16).pages_for(num_tokens) == pages


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 16), (4, 0), (-1, 1)])
def test_an_empty_pool_is_refused(num_pages: int, page_size: int):
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(num_pages, page_size)


@pytest.mark.parametrize("seed", range(5))
def test_random_use_conserves_pages(seed: int):
    rng, pool, holders = random.Random(seed), PagePool(17, 4), []
    for _ in range(500):
        action = rng.random()
        if action < 0.45 and pool.num_free:
            holders.append(pool.alloc(rng.randint(1, pool.num_free)))
        elif action < 0.6 and holders:
            shared = list(rng.choice(holders))
            pool.retain(shared)
            holders.append(shared)
        elif holders:
            pool.release(holders.pop(rng.randrange(len(holders))))
        pool.check_conserved(holders)
