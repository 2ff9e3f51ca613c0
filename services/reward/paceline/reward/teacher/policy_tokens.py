"""What a teacher is compared with: the policy's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.run import RunConfig
from paceline.data.prompts import Tokenizer
from paceline.models.facts import config_tree
from paceline.storage.models import local_model

_NUM_PROBED = 1000
_PROBE = "Paceline 2 + 2 = 4; naïve 数学 🙂\n\tdef f(x): return x ** 2"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokens:
    """The policy's tokens, as far as a teacher has to agree with them.

    Attributes:
        probe: text with tokens from all of the policy's vocabulary.
        probe_ids: its ids by the policy's tokenizer.
        longest: most tokens of a sample.
        vocab_size: size of the policy's vocabulary; None if config.json does not say it.
    """

    probe: str
    probe_ids: tuple[int, ...]
    longest: int
    vocab_size: int | None = None


def policy_tokens(tokenizer: Tokenizer, config: RunConfig) -> PolicyTokens:
    """Returns a run's tokens; the probe has a thousand of them, evenly spaced by id."""
    known = sorted(tokenizer.get_vocab().values())
    chosen = known[:: max(1, len(known) // _NUM_PROBED)]
    probe = _PROBE + tokenizer.decode(chosen, skip_special_tokens=True)
    tree = config_tree(local_model(config.model, "reward").path)
    size = (tree.get("text_config") or tree).get("vocab_size")
    return PolicyTokens(
        probe=probe,
        probe_ids=tuple(tokenizer(probe, add_special_tokens=False)["input_ids"]),
        longest=config.max_model_len,
        vocab_size=size if isinstance(size, int) else None,
    )
