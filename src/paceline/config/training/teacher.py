"""`algorithm.teacher`: a served model whose likeliest tokens the policy learns."""

from __future__ import annotations

from pydantic import Field

from paceline.config.base import Section


class TeacherConfig(Section):
    """A model behind vLLM's OpenAI server; the run's reward service asks it about every training sample."""

    address: str = Field(
        pattern=r"^https?://", description="URL with the version at its end: http://127.0.0.1:8000/v1."
    )
    model: str = Field(description="The model, as its server calls it; it needs the policy's tokenizer.")
    top_k: int = Field(
        20,
        ge=1,
        le=1024,
        description="Number of the teacher's likeliest tokens at each response token. More than 20 need "
        "`--max-logprobs` at its server.",
    )
    key_env: str | None = Field(
        None, description="Environment variable of the reward service that holds the API key."
    )
    concurrency: int = Field(16, gt=0, description="Most concurrent requests of each reward service.")
    timeout_s: float = Field(120.0, gt=0, description="Longest time for one request.")
    retry_for_s: float = Field(
        600.0,
        ge=0,
        description="How long a request is repeated if it does not reach the teacher, if the teacher is too "
        "busy, or if it takes too long; then its sample is delivered again (reward.max_deliveries). 0: "
        "never.",
    )
