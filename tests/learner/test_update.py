"""One update: accumulated, guarded, clipped, applied; or skipped without a trace."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from proximo.learner import update
from proximo.learner.optimizers import OptimizerOptions
from proximo.learner.update import Learner

EXAMPLES = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [3.0, -2.0], [0.5, 0.5]])
TARGETS = torch.tensor([2.0, -1.0, 5.0, 0.0])


def network(seed: int = 0, *, dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Dropout(dropout), nn.Linear(3, 1))


def learner(module: nn.Module | None = None, *, num_updates: int = 10, **options) -> Learner:
    given = {"learning_rate": 0.1, "max_gradient_norm": None, "eps": 1.0} | options
    return Learner(module or network(), OptimizerOptions(**given), num_updates=num_updates)


def squared_error(module: nn.Module, factor: float = 1.0) -> Callable[[Tensor], tuple[Tensor, list[int]]]:
    """The loss of some rows, divided by the four of the whole, and the rows that it saw."""

    def loss(rows: Tensor) -> tuple[Tensor, list[int]]:
        errors = module(EXAMPLES[rows])[:, 0] - TARGETS[rows]
        return factor * errors.square().sum() / len(EXAMPLES), rows.tolist()

    return loss


WHOLE = [torch.arange(4)]


def weights(made: Learner) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in made.parameters.items()}


def moments(made: Learner) -> list[Tensor]:
    return [value.clone() for state in made.optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("cut", [[4], [1, 3], [2, 2], [1, 1, 1, 1]])
def test_micro_batches_add_up_to_the_update_of_the_whole(cut: list[int]) -> None:
    whole, parts = learner(), learner()
    expected = whole.update(WHOLE, squared_error(whole.module))
    found = parts.update(list(torch.arange(4).split(cut)), squared_error(parts.module))
    assert found.loss == pytest.approx(expected.loss)
    assert found.gradient_norm == pytest.approx(expected.gradient_norm)
    assert [row for rows in found.statistics for row in rows] == [0, 1, 2, 3]
    for name, tensor in weights(parts).items():
        torch.testing.assert_close(tensor, weights(whole)[name])


def non_finite_loss(made: Learner) -> dict:
    return {"loss": lambda rows: (squared_error(made.module)(rows)[0] * torch.nan, None)}


def non_finite_gradient(made: Learner) -> dict:
    """The square root has a finite value at 0 and an infinite slope."""

    def loss(rows: Tensor) -> tuple[Tensor, None]:
        return (made.module(EXAMPLES[rows])[:, 0] * 0).abs().sqrt().sum(), None

    return {"loss": loss}


def guarded(made: Learner) -> dict:
    return {"loss": squared_error(made.module), "guard": lambda statistics: f"{len(statistics)} parts are too many"}


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (non_finite_loss, "the loss is nan"),
        (non_finite_gradient, "the gradient norm is"),
        (guarded, "1 parts are too many"),
    ],
)
@pytest.mark.parametrize("updates_before", [0, 2])
def test_a_skipped_update_leaves_weights_momentum_and_count_untouched(case, reason: str, updates_before: int) -> None:
    made = learner(schedule="linear", max_gradient_norm=1.0)
    for _ in range(updates_before):
        made.update(WHOLE, squared_error(made.module))
    before, state, count = weights(made), moments(made), made.updates_done
    result = made.update(WHOLE, **case(made))
    assert result.refusal.startswith(reason)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(made).items())
    assert len(state) == len(moments(made))
    assert all(torch.equal(old, new) for old, new in zip(state, moments(made), strict=True))
    assert made.updates_done == count == updates_before
    assert all(parameter.grad is None for parameter in made.parameters.values())


def test_after_a_skip_the_run_goes_on_as_if_it_had_not_been() -> None:
    disturbed, calm = learner(schedule="linear"), learner(schedule="linear")
    for made in (disturbed, calm):
        made.update(WHOLE, squared_error(made.module))
        if made is disturbed:
            made.update(WHOLE, **non_finite_gradient(made))
            made.update(WHOLE, **guarded(made))
        last = made.update(WHOLE, squared_error(made.module))
        assert last.refusal is None
        assert last.learning_rate == pytest.approx(0.1 * 0.9)
    assert all(torch.equal(weights(disturbed)[name], tensor) for name, tensor in weights(calm).items())


def test_a_loss_that_is_not_finite_ends_the_pass_at_once() -> None:
    made = learner()

    def loss(rows: Tensor) -> tuple[Tensor, list[int]]:
        value, seen = squared_error(made.module)(rows)
        return (value * torch.inf if seen == [1] else value), seen

    assert made.update(list(torch.arange(4).split(1)), loss).statistics == ([0], [1])


def test_the_guard_sees_the_statistics_of_every_micro_batch() -> None:
    made, seen = learner(), []
    made.update(list(torch.arange(4).split(2)), squared_error(made.module), guard=seen.extend)
    assert seen == [[0, 1], [2, 3]]


def test_the_gradient_pass_runs_in_train_mode_and_everything_else_in_eval_mode() -> None:
    module = network().train()
    made, modes = learner(module), []
    assert not any(part.training for part in module.modules())

    def loss(rows: Tensor) -> tuple[Tensor, None]:
        modes.append(all(part.training for part in module.modules()))
        return squared_error(module)(rows)[0], None

    made.update(list(torch.arange(4).split(2)), loss, guard=lambda _: "skipped" if module.training else None)
    assert modes == [True, True]
    assert made.updates_done == 1
    assert not any(part.training for part in module.modules())


def test_around_several_updates_the_mode_changes_once_and_a_failure_leaves_eval_mode() -> None:
    module = network()
    made, changes = learner(module), []
    module.train = lambda mode=True: changes.append(mode) or type(module).train(module, mode)
    loss = squared_error(module)
    with made.training():
        made.update(WHOLE, loss)
        assert all(part.training for part in module.modules())
        made.update(WHOLE, loss)
    assert changes == [True, False]

    def broken(_: Tensor) -> tuple[Tensor, None]:
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        made.update(WHOLE, broken)
    assert not any(part.training for part in module.modules())
    module[2].train()
    module.training = True  # as code of the user's may leave it
    made.update(WHOLE, loss)
    assert not any(part.training for part in module.modules())


def test_the_rate_follows_the_schedule_by_updates_that_were_done() -> None:
    made = learner(num_updates=4, schedule="linear", warmup_updates=1)
    rates = []
    for skip in (False, False, True, True, False, False):
        guard = (lambda _: "no") if skip else (lambda _: None)
        result = made.update(WHOLE, squared_error(made.module), guard=guard)
        rates.append(result.learning_rate)
        if not skip:
            assert {group["lr"] for group in made.optimizer.param_groups} == {result.learning_rate}
    assert rates == pytest.approx([0.05, 0.1, 0.1 * 2 / 3, 0.1 * 2 / 3, 0.1 * 2 / 3, 0.1 / 3])
    assert made.updates_done == 4


def dropped(seed: int | None) -> list[Tensor]:
    """The dropout masks of the two micro-batches of an update."""
    made, masks = learner(network(dropout=0.5)), []

    def loss(rows: Tensor) -> tuple[Tensor, None]:
        masks.append(made.module[2](torch.ones(4, 8)) > 0)
        return squared_error(made.module)(rows)[0], None

    made.update(list(torch.arange(4).split(2)), loss, seed=seed)
    return masks


def test_the_seed_decides_the_dropout_of_each_micro_batch() -> None:
    first, again, other = dropped(3), dropped(3), dropped(4)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    # The second micro-batch of seed 3 is seeded as the first of seed 4: callers keep seeds far apart.
    assert torch.equal(first[1], other[0])


def test_without_a_seed_the_global_generator_is_left_to_go_on() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = dropped(None)
        assert not torch.equal(first[0], dropped(None)[0])
        torch.manual_seed(0)
        assert torch.equal(first[0], dropped(None)[0])


def test_no_number_is_asked_for_before_the_last_backward_pass(monkeypatch: pytest.MonkeyPatch):
    """On an accelerator, where each would be waited for."""
    monkeypatch.setattr(update, "_is_at_hand", lambda _: False)
    order: list[str] = []
    for name in ("item", "tolist", "backward"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda tensor, *given, name=name, plain=plain: (order.append(name), plain(tensor))[1]
        )
    module = torch.nn.Linear(2, 1)
    learner = Learner(module, OptimizerOptions(learning_rate=0.1), num_updates=2)
    learner.update([torch.ones(1, 2), torch.zeros(1, 2)], lambda batch: (module(batch).sum(), batch))
    assert order[:3] == ["backward", "backward", "tolist"]
