"""A scorer that caches the scores of another one."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from paceline.core.scoring import ScoreItem
from paceline.reward.scoring.scorer import Scorer
from paceline.reward.scoring.scores import Score


@runtime_checkable
class Versioned(Protocol):
    """A scorer outside this process, which may be replaced there."""

    @property
    def version(self) -> str | None:
        """Identifies what the scorer computes: "" if it does not say; None while that is unknown."""


class Cached:
    """Asks a scorer only about items whose score it does not have. Errors are not cached.

    Items are equal if response, prompt and row are. A scorer outside this process may be replaced, so its
    `version` is part of the key; while it is unknown (two versions answer, or none is named), every item is
    scored and nothing is cached. The cache ends with the process, so a new configuration begins with an empty
    one.

    Args:
        size: most scores in the cache; the least recently used are evicted first.
    """

    def __init__(self, scorer: Scorer, size: int) -> None:
        self._scorer, self._size = scorer, size
        self._scores: OrderedDict[bytes, Score] = OrderedDict()

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """Returns one score per item, in the order of the items; asks once about equal items of a call."""
        version = self._version()
        if version is None:
            return await self._scorer.score(items, run_id=run_id, step=step)
        keys = [_key(item, version) for item in items]
        new = {key: item for key, item in zip(keys, items, strict=True) if key not in self._scores}
        asked = await self._scorer.score(list(new.values()), run_id=run_id, step=step) if new else []
        answers = dict(zip(new, asked, strict=True))
        scores = []
        for key, item in zip(keys, items, strict=True):
            score = answers.get(key) or self._scores.get(key)
            if score is None:  # evicted while this call waited for another one
                (score,) = await self._scorer.score([item], run_id=run_id, step=step)
            if self._version() == version:
                self._keep(key, score)
            scores.append(replace(score, trajectory_id=item.trajectory_id))
        return scores

    def _version(self) -> str | None:
        return self._scorer.version if isinstance(self._scorer, Versioned) else ""

    def _keep(self, key: bytes, score: Score) -> None:
        if score.error is not None:
            return
        self._scores[key] = replace(score, seconds=0.0)
        self._scores.move_to_end(key)
        while len(self._scores) > self._size:
            self._scores.popitem(last=False)


def _key(item: ScoreItem, version: str) -> bytes:
    extra = json.dumps(item.extra, sort_keys=True, default=repr)
    texts = (item.prompt, item.response, item.ground_truth, item.data_source, item.val_set)
    digest = hashlib.blake2b(digest_size=16)
    for part in (version, *texts, extra, repr(item.episode)):
        text = part.encode(errors="surrogatepass")
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()
