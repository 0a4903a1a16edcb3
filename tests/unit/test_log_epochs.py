"""The history of leader epochs: where each begins, and how far it reaches (KIP-101)."""

from __future__ import annotations

import pytest

from millstream.core.errors import Code
from millstream.log.epochs import Epochs


@pytest.fixture
def epochs() -> Epochs:
    """Epoch 0 from 0, 2 from 10, 5 from 30."""
    made = Epochs()
    made.begin(2, 10)
    made.begin(5, 30)
    return made


@pytest.mark.parametrize(
    ("asked", "answer"),
    [(-1, (-1, -1)), (0, (0, 10)), (1, (0, 10)), (2, (2, 30)), (4, (2, 30)), (5, (5, 50)), (6, (-1, -1))],
)
def test_an_epoch_ends_where_the_next_begins(epochs: Epochs, asked: int, answer: tuple[int, int]) -> None:
    assert epochs.end_of(asked, 50) == answer


@pytest.mark.parametrize(("offset", "epoch"), [(-1, -1), (0, 0), (9, 0), (10, 2), (29, 2), (30, 5), (99, 5)])
def test_an_offset_belongs_to_the_epoch_that_began_before_it(epochs: Epochs, offset: int, epoch: int) -> None:
    assert epochs.at(offset) == epoch


def test_an_epoch_without_a_batch_gives_way_to_the_next(epochs: Epochs) -> None:
    epochs.begin(6, 40)
    epochs.begin(7, 40)
    assert epochs.to_state() == [[0, 0], [2, 10], [5, 30], [7, 40]]


def test_an_older_epoch_does_not_begin_again(epochs: Epochs) -> None:
    epochs.begin(5, 33)
    assert epochs.to_state()[-1] == [5, 30]
    with pytest.raises(ValueError, match="epoch 5 has begun"):
        epochs.begin(4, 50)


def test_a_truncated_log_forgets_the_epochs_behind_its_end(epochs: Epochs) -> None:
    epochs.cut_from(30)
    assert epochs.to_state() == [[0, 0], [2, 10]]
    epochs.cut_from(0)
    assert epochs.latest == 0


def test_a_trimmed_log_keeps_the_epoch_of_its_start(epochs: Epochs) -> None:
    epochs.cut_below(15)
    assert epochs.to_state() == [[2, 15], [5, 30]]
    assert epochs.end_of(0, 50) == (0, 15)
    epochs.cut_below(30)
    assert epochs.to_state() == [[5, 30]]


@pytest.mark.parametrize(
    ("claimed", "code"),
    [(-1, Code.NONE), (5, Code.NONE), (4, Code.FENCED_LEADER_EPOCH), (6, Code.UNKNOWN_LEADER_EPOCH)],
)
def test_a_client_with_another_epoch_than_the_current_one_is_told_so(epochs: Epochs, claimed: int, code: Code) -> None:
    assert epochs.check(claimed) is code


def test_one_leader_for_ever_needs_no_history() -> None:
    assert Epochs().to_state() == []
