"""`reward.*`: how responses are scored."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from paceline.config.base import Section


class ShapedConfig(Section):
    """What all scorers have in common: how their value enters the sum."""

    weight: float = Field(1.0, description="Factor of its value in the sum.")
    min_value: float | None = Field(
        None,
        description="Smaller values enter the sum as this one; null: no bound. Components are not clipped.",
    )
    max_value: float | None = Field(
        None, description="Larger values enter the sum as this one; null: no bound."
    )
    data_sources: tuple[str, ...] = Field(
        (), description="It scores rows of these data sources alone; none: all rows."
    )
    required: bool = Field(
        True,
        description="A response without its value has no reward. false: the value counts as 0, and the "
        "component NAME/failed tells how often.",
    )

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        if self.min_value is not None and self.max_value is not None and self.min_value > self.max_value:
            raise ValueError(f"min_value={self.min_value} must not exceed max_value={self.max_value}")
        return self


class RewardFunctionConfig(ShapedConfig):
    """A function `f(response, ground_truth, **extra) -> float | dict[str, float]`."""

    name: str = Field(description="A built-in's name, module:function, or path/to/file.py:function.")
    kwargs: dict[str, bool | int | float | str | None] = Field(
        {}, description="Further keyword arguments of every call."
    )


class RewardServiceConfig(ShapedConfig):
    """A remote scorer that serves paceline.rpc.v1.RewardService."""

    name: str = Field(description="What its component is called in metrics.")
    address: str = Field(description="host:port.")
    max_items_per_call: int = Field(256, gt=0, description="Largest request.")
    concurrency: int = Field(16, gt=0, description="Requests at once.")
    timeout_s: float | None = Field(
        None, gt=0, description="Longest time for one request; null: reward.timeout_s."
    )
    retry_for_s: float = Field(
        30.0,
        ge=0,
        description="How long requests are repeated for a response, from when it was delivered: those that "
        "do not reach the service, that it is too busy for, or that take too long. 0: never.",
    )
    token_file: str | None = Field(
        None,
        description="A file with the token that the service asks for, on the hosts of the reward service "
        "of the run. null: the run's own token is sent.",
    )


class AttachedConfig(ShapedConfig):
    """A name under which clients attach to the reward service (`paceline.sdk.attach_reward`)."""

    name: str = Field(description="What clients attach as, and what its component is called in metrics.")
    timeout_s: float | None = Field(
        None,
        gt=0,
        description="A response that a client has had for longer goes to another one; null: "
        "reward.timeout_s.",
    )
    wait_for_s: float = Field(
        60.0, ge=0, description="How long a response waits for a client that takes it, before it is an error."
    )


class CodeConfig(ShapedConfig):
    """Runs the program in a response against the tests in its row's ground truth, confined."""

    name: str = Field(description="What its component is called in metrics.")
    command: tuple[str, ...] = Field(
        (), description="Absolute path and arguments, {file} for the program's file; none: Python."
    )
    file: str = Field("program.py", pattern=r"^[\w.-]+$", description="Name of the program's file.")
    read_only: tuple[str, ...] = Field(
        (), description="Further folders that programs see, beside the system's and Python's."
    )
    test_timeout_s: float = Field(10.0, gt=0, description="Longest time for one test.")
    memory_mib: int = Field(512, gt=0, description="Most memory of each process of a program.")
    max_processes: int = Field(8, gt=0, description="Most processes and threads of a program at a time.")
    concurrency: int = Field(2, gt=0, description="Programs that run at a time.")


class RewardConfig(Section):
    """Scorers and their limits. The reward is the weighted sum over all of them."""

    functions: tuple[RewardFunctionConfig, ...] = Field(
        (), description="Functions, called in child processes that can be killed."
    )
    services: tuple[RewardServiceConfig, ...] = Field((), description="Remote scorers.")
    attached: tuple[AttachedConfig, ...] = Field((), description="Scorers that attach to the reward service.")
    environment_weight: float = Field(
        1.0,
        description="Factor in the sum of the reward that an episode's environment gives, if it gives one.",
    )
    code: tuple[CodeConfig, ...] = Field((), description="Scorers that run the program in a response.")
    num_processes: int = Field(1, gt=0, description="Child processes that call the functions.")
    memory_mib: int | None = Field(
        8192,
        gt=0,
        description="Most memory of a child process, and of each process that it starts; null: no limit.",
    )
    pass_env: tuple[str, ...] = Field(
        (),
        description="Environment variables of the reward service that functions see beside the common ones: "
        "keys of an API, say.",
    )
    timeout_s: float = Field(
        10.0, gt=0, description="Longest time for one item, or for one request to a service."
    )
    max_deliveries: int = Field(
        4,
        gt=0,
        description="Times that a response is given to the reward services before a timeout, a crash or an "
        "unreachable service is its final error.",
    )
    min_reward: float = Field(-1e6, description="Smaller sums are errors.")
    max_reward: float = Field(1e6, description="Larger sums are errors.")
    max_dropped_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Largest share of a step's prompt groups that may be dropped for reward errors; the run "
        "stops beyond it.",
    )

    @property
    def has_scorer(self) -> bool:
        """Whether anything scores responses; an episode's environment may do it in their place."""
        return bool(self.functions or self.services or self.attached or self.code)

    @model_validator(mode="after")
    def _has_range(self) -> RewardConfig:
        if self.min_reward >= self.max_reward:
            raise ValueError(f"min_reward={self.min_reward} must be below max_reward={self.max_reward}")
        return self
