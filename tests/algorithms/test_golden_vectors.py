"""Numbers from the programs that this one unites: TRL 0.11, torchtune, AReaL, DeepSpeed-Chat, torchrl.

Where the original is wrong (its whitening keeps the mean, or leaks outside the mask), the number is the right one.
Tolerance 1e-5, the digits to which they were written down. Padded rows of the originals are laid end to end here.
"""

import pytest
import torch
from torch import Tensor

from proximo.algorithms import advantages
from proximo.algorithms.advantages import NOTHING_SEEN, clip_scores, gae, prefix_deltas, shape_rewards
from proximo.algorithms.behaviour import behaviour_ratios, bounded_weights
from proximo.algorithms.controllers import adaptive_kl
from proximo.algorithms.group_baselines import group_standardised
from proximo.algorithms.kl import absolute, full_kl, k1, k2, k3
from proximo.algorithms.losses import (
    clipped_value_loss,
    policy_statistics,
    value_statistics,
)
from proximo.algorithms.masking import masked_mean, masked_variance, rescale, segment_sum, standardise
from proximo.algorithms.objectives import gspo, ppo, sapo, sequence_ratios
from proximo.algorithms.preferences import TokenScores, bradley_terry, divergence_window
from proximo.algorithms.value_scale import ReturnMoments, cumulative_moments, exponential_moments
from proximo.config.ppo.options import PPOConfig
from proximo.ppo.experience import count_responses, shape_scores
from proximo.records import Finish, Scored
from records_made import response


@pytest.fixture(autouse=True, params=["as on a CPU", "as on an accelerator"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Discounted sums by a loop over time, and by a scan."""
    monkeypatch.setattr(advantages, "goes_by_scan", lambda _: request.param == "as on an accelerator")


def numbers(*rows: list[float]) -> Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def all_of(x: Tensor) -> Tensor:
    return torch.ones(len(x), dtype=torch.bool)


def assert_close(found: Tensor | float, *wanted: list[float] | float) -> None:
    rows = [row if isinstance(row, list) else [row] for row in wanted]
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64).flatten(), numbers(*rows), rtol=0, atol=1e-5)


def terminated(num_responses: int) -> Tensor:
    """No response goes on after its last token."""
    return torch.zeros(num_responses, dtype=torch.bool)


class TestTRL:
    LENGTHS = (3, 2)
    LOGPROBS = numbers([-1, -2, -0.5], [-0.3, -0.7])
    REFERENCE = numbers([-1.2, -1.5, -0.9], [-0.1, -1.7])
    SCORES = numbers([1, -0.5])
    VALUES = numbers([0.1, 0.2, 0.3, 9.0], [0.5, 0.4, 9.0])
    TOKEN_VALUES = numbers([0.1, 0.2, 0.3], [0.5, 0.4])
    MASK = all_of(LOGPROBS)

    def rewards(self, measure=k1) -> Tensor:
        kl = measure(self.LOGPROBS, self.REFERENCE)
        return shape_rewards(kl, self.SCORES, self.MASK, self.LENGTHS, kl_coefficient=0.2)

    def advantages(self, rewards: Tensor) -> tuple[Tensor, Tensor]:
        options = {"bootstrap": terminated(2), "gamma": 1.0, "lam": 0.95}
        advantages, returns = gae(rewards, self.VALUES, self.MASK, self.LENGTHS, **options)
        return standardise(advantages, self.MASK, correction=1), returns

    def test_estimates_of_kl(self):
        assert_close(k1(self.LOGPROBS, self.REFERENCE), [0.2, -0.5, 0.4], [-0.2, 1.0])

    @pytest.mark.parametrize(
        ("measure", "wanted"),
        [
            (k1, [-0.04, 0.1, 0.92, 0.04, -0.7]),
            (absolute, [-0.04, -0.1, 0.92, -0.04, -0.7]),
            (k2, [-0.004, -0.025, 0.984, -0.004, -0.6]),
        ],
    )
    def test_rewards(self, measure, wanted):
        assert_close(self.rewards(measure), wanted)

    def test_full_kl(self):
        policy, reference = numbers([0.98, 0.01, 0.01]).log(), numbers([0.01, 0.01, 0.98]).log()
        assert_close(full_kl(policy, reference), 4.447419)

    def test_advantages_and_returns(self):
        advantages, returns = self.advantages(self.rewards())
        assert_close(advantages, [0.797594, 0.777279, 0.610216], [-1.095016, -1.090073])
        assert_close(returns, [0.90955, 0.989, 0.92], [-0.605, -0.7])

    def test_advantages_of_rescaled_rewards(self):
        rewards = rescale(self.rewards(), self.MASK, correction=1)
        assert_close(rewards, [-0.116419, 0.126453, 1.548984], [0.022365, -1.261383])
        advantages, returns = self.advantages(rewards)
        assert_close(advantages, [0.727775, 0.780943, 0.680795], [-1.093097, -1.096416])
        assert_close(returns, [1.425919, 1.612987, 1.548984], [-1.155948, -1.261383])

    def test_whitening(self):
        x, mask = numbers([1, 2, 3, 4]), torch.tensor([True, True, True, False])
        assert_close(standardise(x, mask, correction=1)[mask], [-1, 0, 1])
        assert_close(rescale(x, mask, correction=1)[mask], [1, 2, 3])

    def test_policy_loss_and_its_statistics(self):
        advantages, _ = self.advantages(self.rewards())
        logprobs = self.LOGPROBS + numbers([0.1, -0.3, 0.5], [0, 0.25])
        clips = {"clip_low": 0.2, "clip_high": 0.2}
        loss = ppo(logprobs, self.LOGPROBS, advantages, **clips).loss
        assert_close(masked_mean(loss, self.MASK), 0.061028)
        clipped = ppo(logprobs, self.LOGPROBS, advantages, **clips).clipped
        found = policy_statistics(logprobs, self.LOGPROBS, clipped, self.MASK)
        assert_close(masked_mean(k2(self.LOGPROBS, logprobs), self.MASK), 0.04125)
        assert_close(masked_mean(k1(self.LOGPROBS, logprobs), self.MASK), -0.11)
        assert_close(found.clipped / found.num_tokens, 0.2)

    def test_value_loss_and_its_statistics(self):
        _, returns = self.advantages(self.rewards())
        values = self.TOKEN_VALUES + numbers([0.3, -0.1, 0.05], [-0.5, 0.1])
        loss = clipped_value_loss(values, self.TOKEN_VALUES, returns, clip=0.2)
        assert_close(masked_mean(loss, self.MASK), 0.374580)
        found = value_statistics(values, self.TOKEN_VALUES, returns, self.MASK, clip=0.2)
        assert_close(found.clipped / found.num_tokens, 0.4)
        unclipped = clipped_value_loss(values, self.TOKEN_VALUES, returns, clip=None)
        assert_close(2 * masked_mean(unclipped, self.MASK), 0.636177)
        assert_close(masked_mean(values, self.MASK), 0.27)
        assert_close(masked_variance(returns, self.MASK, correction=1), 0.762415)
        assert_close(masked_variance(self.TOKEN_VALUES, self.MASK, correction=1), 0.025)

    @pytest.mark.parametrize(
        ("observed", "wanted"), [(0, 0.198976), (3, 0.198976), (6, 0.2), (6.6, 0.200512), (60, 0.201024)]
    )
    def test_adaptive_kl(self, observed, wanted):
        found = adaptive_kl(0.2, observed=observed, target=6, horizon=10_000, num_sequences=256)
        assert found == pytest.approx(wanted, abs=1e-8)

    def test_reward_model_loss(self):
        chosen, rejected = numbers([1]), numbers([0.5])
        assert_close(bradley_terry(chosen, rejected), 0.474077)
        assert_close(bradley_terry(chosen, rejected, margin=numbers([0.2])), 0.554355)
        assert_close(bradley_terry(chosen, rejected, centring=0.01), 0.474077 + 0.0225)


class TestTorchtune:
    """Its score stands one place after the last token, at a value that is trained towards it: one more entry here."""

    LENGTHS = (4, 3)
    REWARDS = numbers([-0.04, 0.1, -0.08, 1], [0.04, -0.2, -0.5])
    VALUES = numbers([0.1, 0.2, 0.3, 0.25, 0], [0.5, 0.4, 0.35, 0])
    IN_LOSS = torch.tensor([True, True, True, False, True, True, False])
    # The whitening that keeps the mean, with which the original losses were computed.
    ORIGINAL_ADVANTAGES = numbers([0.800113, 0.777081, 0.600844, 0], [-1.097965, -1.090617, 0])

    def gae(self) -> tuple[Tensor, Tensor]:
        mask = all_of(self.REWARDS)
        return gae(self.REWARDS, self.VALUES, mask, self.LENGTHS, bootstrap=terminated(2), gamma=1.0, lam=0.95)

    def test_rewards_with_the_score_one_place_after_the_last_token(self):
        kl = k1(numbers([-1, -2, -0.5, 1], [-0.3, -0.7, 1]), numbers([-1.2, -1.5, -0.9, 1], [-0.1, -1.7, 1]))
        rewards = shape_rewards(kl, numbers([1, -0.5]), all_of(kl), self.LENGTHS, kl_coefficient=0.2)
        assert_close(rewards, self.REWARDS.tolist())

    def test_penalties(self):
        """Rows [5, 6, 2], [5, 2, 7], [5, 6, 7], [2, 3, 4], cut behind the stop token 2. The original's masks say
        otherwise of the third and of the second row: it looks one place too far."""
        lengths = (3, 2, 3, 1)
        ends = [Finish.EOS if ended else Finish.LENGTH for ended in (True, True, False, True)]
        answers = [response([5] * n, finish=end) for n, end in zip(lengths, ends, strict=True)]
        rows = [Scored(response=answer, score=0.0) for answer in answers]
        for score, wanted in (
            ({"missing_eos_penalty": 1}, [0, 0, 1, 0]),
            ({"min_tokens": 2, "min_tokens_penalty": 1}, [0, 0, 0, 1]),
        ):
            config = PPOConfig(score=score)
            found = shape_scores(rows, count_responses(rows, config), config=config, moments=NOTHING_SEEN)
            assert (-found.values).tolist() == wanted

    def test_gae(self):
        advantages, returns = self.gae()
        assert_close(advantages, [0.775706, 0.753375, 0.5825, 0.75], [-1.064625, -1.0575, -0.85])
        assert_close(returns, [0.875706, 0.953375, 0.8825, 1], [-0.564625, -0.6575, -0.5])

    def test_standardised_advantages_have_mean_zero(self):
        advantages, _ = self.gae()
        found = standardise(advantages, self.IN_LOSS, correction=1)
        assert_close(found, [0.802222, 0.779190, 0.602953, 0], [-1.095857, -1.088508, 0])

    def test_losses(self):
        old_logprobs = numbers([-1, -2, -0.5, 1], [-0.3, -0.7, 1])
        logprobs = old_logprobs + numbers([0.1, -0.3, 0.5, 0], [0, 0.25, 0])
        arguments = logprobs, old_logprobs, self.ORIGINAL_ADVANTAGES
        loss = ppo(*arguments, clip_low=0.2, clip_high=0.2).loss
        assert_close(masked_mean(loss, self.IN_LOSS), 0.063479)
        clipped = ppo(*arguments, clip_low=0.2, clip_high=0.2).clipped
        found = policy_statistics(logprobs, old_logprobs, clipped, self.IN_LOSS)
        assert_close(found.clipped / found.num_tokens, 0.2)
        # The original's 1.097342 is the mean over eight places, of which three do not count and have ratio 1.
        assert_close(found.ratio / found.num_tokens, (8 * 1.097342 - 3) / 5)

        old_values = numbers([0.1, 0.2, 0.3, 0.25], [0.5, 0.4, 0.35])
        values = old_values + numbers([0.3, -0.1, 0.05, 0.4], [-0.5, 0.1, 0])
        _, returns = self.gae()
        assert_close(clipped_value_loss(values, old_values, returns, clip=0.2).mean(), 0.318259)

    @pytest.mark.parametrize(("change", "wanted"), [(1.0, -1.2), (-1.0, -0.367879), (0.1, -1.105171)])
    def test_policy_loss_in_each_corner(self, change, wanted):
        old_logprobs, advantages = numbers([0.5, 0.8, 1.2]), numbers([1, 1, 1])
        loss = ppo(old_logprobs + change, old_logprobs, advantages, clip_low=0.2, clip_high=0.2).loss
        assert_close(loss.mean(), wanted)

    def test_rewards(self):
        logprobs = numbers([0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.6, 0.7, 0.8])
        reference_logprobs = numbers([0.2, 0.3, 0.4], [0.6, 0.7, 0.8], [0.9, 1.0, 1.1])
        kl = k1(logprobs, reference_logprobs)
        assert_close(kl, [-0.1] * 3, [-0.2] * 3, [-0.3] * 3)
        rewards = shape_rewards(kl, numbers([1, 2, 3]), all_of(kl), (3, 3, 3), kl_coefficient=0.5)
        assert_close(rewards, [0.05, 0.05, 1.05], [0.1, 0.1, 2.1], [0.15, 0.15, 3.15])

    def test_returns_with_a_discount(self):
        rewards, values = numbers([0, 0, 0, 1]), numbers([0, 0, 0, 1, 9])
        _, returns = gae(rewards, values, all_of(rewards), (4,), bootstrap=terminated(1), gamma=0.9, lam=0.95)
        assert_close(returns, [0.657923, 0.7695, 0.9, 1])


class TestAReaL:
    LENGTHS = (4, 3)
    KL = k1(numbers([0, -1, -2, -0.5], [0, -0.3, -0.7]), numbers([0, -1.2, -1.5, -0.9], [0, -0.1, -1.7]))
    MASK = all_of(KL)

    @pytest.mark.parametrize(("second", "last"), [(-30.0, -20.1), (0.0, -0.1), (-1.0, -1.1)])
    def test_rewards_with_clipped_scores(self, second, last):
        scores = clip_scores(numbers([1, second]), 20)
        rewards = shape_rewards(self.KL, scores, self.MASK, self.LENGTHS, kl_coefficient=0.1)
        assert_close(rewards, [0, -0.02, 0.05, 0.96], [0, 0.02, last])

    @pytest.mark.parametrize(
        ("kind", "rewards"),
        [
            ("deltas", [0.1, 0.18, 0.35, 0.36, 0, 0.52, -0.35]),
            ("absolute", [0.1, 0.28, 0.65, 0.96, 0, 0.52, 0.15]),
        ],
    )
    def test_dense_rewards(self, kind, rewards):
        self.check_dense(kind, [0.0, 0.1, 0.3, 0.6, 1.0], [0.0, 0.0, 0.5, 0.25], wanted=rewards)

    @pytest.mark.parametrize(
        ("kind", "rewards"),
        [
            # Of the prompts: 0.5 and -0.2. Differences do not see what is added to all scores of a sequence.
            ("deltas", [0.1, 0.18, 0.35, 0.36, 0, 0.52, -0.35]),
            ("absolute", [0.6, 0.78, 1.15, 1.46, -0.2, 0.32, -0.05]),
        ],
    )
    def test_dense_rewards_begin_at_what_the_prompt_is_worth(self, kind, rewards):
        self.check_dense(kind, [0.5, 0.6, 0.8, 1.1, 1.5], [-0.2, -0.2, 0.3, 0.05], wanted=rewards)

    @pytest.mark.parametrize(
        ("kind", "rewards"),
        [
            # 1.1, 1.5 and 1.3 become 1, the -1.2 of the second prompt becomes -1.
            ("deltas", [0.1, 0.18, 0.25, -0.04, 0.8, 0.52, 0.6]),
            ("absolute", [0.6, 0.78, 1.05, 0.96, -0.2, 0.32, 0.9]),
        ],
    )
    def test_dense_rewards_are_clipped_at_each_token_before_they_are_subtracted(self, kind, rewards):
        scores = [0.5, 0.6, 0.8, 1.1, 1.5], [-1.2, -0.2, 0.3, 1.3]
        self.check_dense(kind, *(clip_scores(numbers(row), 1.0).tolist() for row in scores), wanted=rewards)

    def check_dense(self, kind: str, *scores: list[float], wanted: list[float]) -> None:
        """`scores` of each sequence: the prompt's, and one after each token."""
        prefixes = numbers(*scores)
        after = numbers(*(row[1:] for row in scores))
        earned = prefix_deltas(prefixes, self.LENGTHS) if kind == "deltas" else after
        found = shape_rewards(
            self.KL,
            segment_sum(earned, self.LENGTHS),
            self.MASK,
            self.LENGTHS,
            kl_coefficient=0.1,
            token_rewards=earned,
        )
        assert_close(found, wanted)

    @pytest.mark.parametrize(
        ("gamma", "lam", "advantages"),
        [
            (1.0, 0.95, [0.791505, 0.7279, 0.682, 0.56, -1.259, -1.22, -1.2]),
            (0.9, 0.5, [0.175805, 0.2129, 0.362, 0.56, -0.43655, -0.659, -1.22]),
        ],
    )
    def test_gae_of_an_ended_and_a_cut_answer(self, gamma, lam, advantages):
        rewards = shape_rewards(self.KL, numbers([1, -1]), self.MASK, self.LENGTHS, kl_coefficient=0.1)
        values = numbers([0.1, 0.2, 0.3, 0.4, 9.0], [0.5, 0.4, 0.3, 0.2])
        cut = torch.tensor([False, True])
        found = gae(rewards, values, self.MASK, self.LENGTHS, bootstrap=cut, gamma=gamma, lam=lam)
        assert_close(found[0], advantages)
        assert_close(found[1] - numbers([0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3]), advantages)

    def test_policy_loss_and_its_statistics(self):
        logprobs, old_logprobs = numbers([-1, -2, -0.5, -1]), numbers([-1.2, -1, -0.6, -3])
        arguments = logprobs, old_logprobs, numbers([1, -1, 2, -1])
        assert_close(ppo(*arguments, clip_low=0.2, clip_high=0.2).loss.mean(), 1.194679)
        clipped = ppo(*arguments, clip_low=0.2, clip_high=0.2).clipped
        found = policy_statistics(logprobs, old_logprobs, clipped, all_of(logprobs))
        assert_close(found.clipped / 4, 0.5)
        assert_close(found.ratio / 4, 2.520877)
        assert_close(k1(old_logprobs, logprobs).mean(), -0.325)

    def test_dual_clip(self):
        logprobs, old_logprobs = numbers([-1, -2, -0.5, -1]), numbers([-1.2, -1, -0.6, -3])
        found = ppo(logprobs, old_logprobs, numbers([1, -1, 2, -1]), clip_low=0.2, clip_high=0.2, dual_clip=3)
        assert_close(found.loss, [-1.2, 0.8, -2.210342, 3])
        assert_close(found.loss.mean(), 0.097414)
        # Beside the two tokens that the first clip holds, the one that the second does.
        assert found.clipped.tolist() == [True, True, False, True]

    def test_loss_with_behaviour_weights(self):
        logprobs, sampled = numbers([-1, -2, -0.5, -1]), numbers([-1.2, -1, -0.6, -3])
        proximal = numbers([-1.1, -1.2, -0.6, -1.5])
        loss = ppo(logprobs, proximal, numbers([1, -1, 2, -1]), clip_low=0.2, clip_high=0.2).loss
        ratios = behaviour_ratios(proximal, sampled, all_of(proximal), (4,), of="token")
        weights = bounded_weights(ratios, floor=0, cap=10, masked=False)
        assert_close(weights, [1.105171, 0.818731, 1, 4.481689])
        assert_close(weights * loss, [-1.221403, 0.654985, -2.210342, 7.389056])
        assert_close((weights * loss).mean(), 1.153074)
        assert_close((bounded_weights(ratios, floor=0, cap=2, masked=True) * loss).mean(), -0.694190)

    def test_huber_value_loss(self):
        values, old_values, returns = numbers([1, 0.5, 20]), numbers([0.5] * 3), numbers([1.2, 0, 3])
        loss = clipped_value_loss(values, old_values, returns, clip=0.2, huber_delta=10)
        assert_close(loss.mean(), 40.083332)
        found = value_statistics(values, old_values, returns, all_of(values), clip=0.2)
        assert_close(found.clipped / found.num_tokens, 1 / 3)

    def test_value_loss_and_its_statistics(self):
        values, old_values, returns = numbers([1, 0.5, 2]), numbers([0.5] * 3), numbers([1.2, 0, 3])
        assert_close(clipped_value_loss(values, old_values, returns, clip=0.2).mean(), 0.965)
        found = value_statistics(values, old_values, returns, all_of(values), clip=0.2)
        assert_close(found.clipped / found.num_tokens, 2 / 3)

    def test_standardising_with_the_biased_variance(self):
        # 1e-5 beside the deviation there, under the root here: translated.
        deviation = (2 / 3) ** 0.5
        found = standardise(
            numbers([1, 2, 3, 4]),
            torch.tensor([True, True, True, False]),
            epsilon=(deviation + 1e-5) ** 2 - deviation**2,
        )
        assert_close(found, [-1.22473, 0, 1.22473, 0])

    def moments(self, returns: Tensor, mask: Tensor) -> dict[str, float]:
        return {"mean": float(masked_mean(returns, mask)), "variance": float(masked_variance(returns, mask))}

    def test_exponential_moments_of_returns(self):
        first = self.moments(numbers([1, 2, 3, 100]), torch.tensor([True, True, True, False]))
        found = exponential_moments(ReturnMoments(), **first, decay=0.99995)
        assert_close(found.mean, 2)
        assert_close(found.variance**0.5, 0.816497)
        found = exponential_moments(found, **self.moments(numbers([5, 7]), all_of(numbers([5, 7]))), decay=0.99995)
        assert_close(found.mean, 4.00005)
        assert_close(found.variance**0.5, 2.198485)

    def test_cumulative_moments_of_returns(self):
        found = ReturnMoments()
        for returns in (numbers([1, 2, 3]), numbers([5, 7])):
            found = cumulative_moments(found, **self.moments(returns, all_of(returns)), count=len(returns))
        assert_close(found.mean, 3.6)
        assert_close(found.variance**0.5, 2.154066)

    @pytest.mark.parametrize(("observed", "wanted"), [(3, 0.098976), (6, 0.1), (9, 0.101024)])
    def test_adaptive_kl_fed_with_the_right_sign(self, observed, wanted):
        found = adaptive_kl(0.1, observed=observed, target=6, horizon=10_000, num_sequences=512)
        assert found == pytest.approx(wanted, abs=1e-8)


class TestDeepSpeedChat:
    """Its score stands one place after the last token too: lengths count that place."""

    LENGTHS = (3, 4)
    KL = torch.full((7,), 0.5, dtype=torch.float64)
    REWARDS = ([-0.05, -0.05, 4.95], [-0.05, -0.05, -0.05, 1.95])

    def test_rewards_with_clipped_scores(self):
        scores = clip_scores(numbers([9, 2]), 5)
        rewards = shape_rewards(self.KL, scores, all_of(self.KL), self.LENGTHS, kl_coefficient=0.1)
        assert_close(rewards, *self.REWARDS)

    def test_gae(self):
        values = torch.full((9,), 0.5, dtype=torch.float64)
        advantages, returns = gae(
            numbers(*self.REWARDS), values, all_of(self.KL), self.LENGTHS, bootstrap=terminated(2), gamma=1.0, lam=0.95
        )
        # Written down with four decimals.
        wanted = numbers([3.9186, 4.1775, 4.45], [1.1006, 1.2111, 1.3275, 1.45])
        torch.testing.assert_close(advantages, wanted, rtol=0, atol=5.1e-5)
        torch.testing.assert_close(returns, wanted + 0.5, rtol=0, atol=5.1e-5)

    def test_losses(self):
        mask = torch.tensor([True, True, True, False])
        logprobs, old_logprobs = numbers([-1, -2, -0.5, -9]), numbers([-1.2, -1, -0.6, -1])
        loss = ppo(logprobs, old_logprobs, numbers([1, -1, 2, 5]), clip_low=0.2, clip_high=0.2).loss
        assert masked_mean(loss, mask).item() == pytest.approx(-0.8701, abs=5.1e-5)
        value_loss = clipped_value_loss(
            numbers([1, 0.5, 2, 9]), numbers([0.5] * 3 + [0]), numbers([1.2, 0, 3, 0]), clip=0.2
        )
        assert_close(masked_mean(value_loss, mask), 0.965)

    def test_pairwise_loss_when_padding_is_given_as_a_token(self):
        """The original compares padding too. Given to us as a token that scores 0, the number is the same."""
        chosen = TokenScores(token_ids=torch.tensor([3, 4, 5, 6]), scores=numbers([0.3, 0.4, 0.5, 0.6]), lengths=(4,))
        rejected = TokenScores(token_ids=torch.tensor([3, 4, 7, 0]), scores=numbers([0.3, 0.4, 0.7, 0]), lengths=(4,))
        assert divergence_window(chosen, rejected).item() == pytest.approx(0.6178, abs=5e-5)
        assert_close(divergence_window(chosen, chosen), 0.693147)

    def test_pairwise_loss_without_padding(self):
        """The same pair as it is: the shorter answer stands at its last score, which is the one that PPO would read."""
        chosen = TokenScores(token_ids=torch.tensor([3, 4, 5, 6]), scores=numbers([0.3, 0.4, 0.5, 0.6]), lengths=(4,))
        rejected = TokenScores(token_ids=torch.tensor([3, 4, 7]), scores=numbers([0.3, 0.4, 0.7]), lengths=(3,))
        # The mean of log(1 + e^0.2) and log(1 + e^0.1).
        assert_close(divergence_window(chosen, rejected), 0.771268)


class TestTorchrl:
    @pytest.mark.parametrize(
        ("observed", "num_sequences", "wanted"), [(6.0, 2, 0.1), (0.1, 4, 0.099992), (30.0, 32, 0.100064)]
    )
    def test_adaptive_kl(self, observed, num_sequences, wanted):
        """The original is fed with -coefficient * KL; here it is the KL itself."""
        found = adaptive_kl(0.1, observed=observed, target=6, horizon=10_000, num_sequences=num_sequences)
        assert found == pytest.approx(wanted, abs=1e-9)


class TestFormulas:
    def test_estimators_of_kl(self):
        logprobs, reference_logprobs = numbers([-1.0]), numbers([-1.5])
        assert_close(k1(logprobs, reference_logprobs), 0.5)
        assert_close(k2(logprobs, reference_logprobs), 0.125)
        assert_close(k3(logprobs, reference_logprobs), 0.106531)

    @pytest.mark.parametrize(("correction", "epsilon", "wanted"), [(1, 1e-4, 0.865875), (0, 1e-5, 0.99998)])
    def test_group_standardising(self, correction, epsilon, wanted):
        scores, group_ids = numbers([1, 0, 0, 1]), torch.tensor([5, 5, 5, 5])
        found = group_standardised(scores, group_ids, all_of(scores), correction=correction, epsilon=epsilon)
        assert_close(found, [wanted, -wanted, -wanted, wanted])

    def test_ratio_of_a_sequence(self):
        differences = numbers([0.2, -0.1, 0.3])
        mask = all_of(differences)
        assert_close(sequence_ratios(differences, torch.zeros_like(differences), mask, (3,)), 1.142631)
        found = gspo(
            differences, torch.zeros_like(differences), -torch.ones(3), mask, (3,), clip_low=0.5, clip_high=0.5
        )
        assert_close(found.loss, [1.142631] * 3)

    @pytest.mark.parametrize(
        ("advantage", "gates"), [(1.0, [2.220503, 1.904909, 2.346334]), (-1.0, [2.125173, 1.809679, 2.250739])]
    )
    def test_soft_gates(self, advantage, gates):
        differences = numbers([0.2, -0.1, 0.3])
        advantages = torch.full_like(differences, advantage)
        found = sapo(differences, torch.zeros_like(differences), advantages, gate_positive=1.0, gate_negative=1.05)
        assert_close(found.loss, [-advantage * gate for gate in gates])
