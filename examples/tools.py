"""Tools for a policy, as a class in TRL's form: `proximo ppo examples/tools.yaml` (docs/environments.md)."""

from random import Random


class Shop:
    """A price list that the policy may look up. The question is what some things cost together."""

    def reset(self, episode: int, **_: object) -> str:
        """Ask for the sum of two prices. `episode`: the number of the row, from which prices and question follow."""
        random = Random(episode)
        self._prices = {name: random.randint(2, 60) for name in ("apples", "bread", "cheese", "dates", "eggs")}
        one, two = random.sample(sorted(self._prices), 2)
        self._total, self._paid = self._prices[one] + self._prices[two], None
        return f"What do {one} and {two} cost together? Look up both prices, then pay the total."

    def price(self, name: str) -> str:
        """Look up a price.

        Args:
            name: One thing, such as apples."""
        return str(self._prices.get(name, f"no {name} here; there are {', '.join(self._prices)}"))

    def pay(self, total: int) -> str:
        """Pay, which ends the purchase.

        Args:
            total: The sum of the prices."""
        self._paid = total if self._paid is None else self._paid  # once
        return "thank you"

    def get_reward(self) -> float:
        """1 for the right sum."""
        return float(self._paid == self._total)
