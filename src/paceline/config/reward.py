"""`reward.*`: how responses are scored."""

from __future__ import annotations

from collections import Counter
from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.core.scoring import MAX_ITEMS_PER_CALL

NUMBER = r"(-?\d+(?:\.\d+)?)"
"""Finds a judge's grade where it is a number."""

TOTALS = frozenset({"reward", "response_length", "greedy_answers"})
"""Names that metrics use for more than one component: `val/reward/mean` is the mean of the weighted sums."""


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
    normalize: Literal["batch"] | None = Field(
        None,
        description="batch: in training its clipped value is normalised before it is weighted: minus the "
        "mean over the samples of the step's batch, divided by their standard deviation. null: as it is.",
    )
    data_sources: tuple[str, ...] = Field(
        (), description="It scores only rows of these data sources; empty: all rows."
    )
    where: dict[str, tuple[str, ...]] = Field(
        {},
        description="It scores only rows whose columns have one of these values, as text: {level: [hard, "
        "harder]}; the columns must be in data.extra_keys.",
    )
    weight_key: str | None = Field(
        None,
        description="Column of data.extra_keys with one more factor of its value for each row; null: none.",
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


class GroupedConfig(Section):
    """The option of scorers that can score the samples of a prompt together."""

    group: bool = Field(
        False,
        description="It gets all samples of a prompt in one call, and gives one value for each: "
        "f(items: list[ScoreItem]) -> list.",
    )


class OutsideConfig(ShapedConfig):
    """What scorers beside the functions have in common."""

    cache_size: int = Field(
        0,
        ge=0,
        description="Most scores that each reward service remembers, by response, prompt and row, so that it "
        "does not score the same response again. 0: none; keep it for a scorer whose answers are drawn.",
    )


class RewardFunctionConfig(GroupedConfig, ShapedConfig):
    """A function `f(response, ground_truth, **extra) -> float | dict[str, float]`."""

    name: str = Field(
        description="A built-in's name, module:function, or path/to/file.py:function. Functions in the forms "
        "of verl and TRL are called their way (docs/from-verl-and-trl.md)."
    )
    kwargs: dict[str, bool | int | float | str | None] = Field(
        {}, description="Further keyword arguments of every call."
    )


class RewardServiceConfig(GroupedConfig, OutsideConfig):
    """A remote scorer that serves paceline.rpc.v1.RewardService."""

    name: str = Field(description="What its component is called in metrics.")
    address: str = Field(description="host:port.")
    max_items_per_call: int = Field(256, gt=0, le=MAX_ITEMS_PER_CALL, description="Largest request.")
    concurrency: int = Field(16, gt=0, description="Requests at once.")
    timeout_s: float | None = Field(
        None, gt=0, description="Longest time for one request; null: reward.timeout_s."
    )
    retry_for_s: float = Field(
        30.0,
        ge=0,
        description="How long a request is repeated, from the delivery of its responses on, if it does not "
        "reach the service, finds it too busy, or takes too long. 0: never.",
    )
    token_file: str | None = Field(
        None,
        description="A file with the token that the service asks for, on the hosts of the run's reward "
        "services. null: the run's own token is sent.",
    )
    tls: bool | None = Field(
        None,
        description="Whether it is called over TLS. null: if the run's reward services have TLS files "
        "(PACELINE_TLS_DIR). false: in plain text; then a token is sent only to addresses of this machine, "
        "unless service.insecure is set.",
    )
    tls_dir: str | None = Field(
        None,
        description="A folder on the hosts of the run's reward services: ca.pem of the authority that signed "
        "its certificate, and cert.pem with key.pem if it asks its clients for one. null: the run's own.",
    )
    tls_name: str | None = Field(
        None,
        description="Name that its certificate must have. null: reward.paceline, as `paceline certs issue` "
        "writes it.",
    )

    @model_validator(mode="after")
    def _says_how_over_tls(self) -> Self:
        given = [key for key in ("tls_dir", "tls_name") if getattr(self, key) is not None]
        if self.tls is False and given:
            raise ValueError(
                f"the reward service {self.name!r} has tls: false, where {', '.join(given)} would have no "
                "effect: remove one of the two"
            )
        return self


class AttachedConfig(GroupedConfig, OutsideConfig):
    """A name under which clients attach to the reward service (`paceline.sdk.attach_reward`)."""

    name: str = Field(description="What clients attach as, and what its component is called in metrics.")
    timeout_s: float | None = Field(
        None,
        gt=0,
        description="A client that has had a response for longer loses it to another client; null: "
        "reward.timeout_s.",
    )
    wait_for_s: float = Field(
        60.0, ge=0, description="How long a response waits for a client that takes it, before it is an error."
    )


class RewardModelConfig(OutsideConfig):
    """A reward model that `paceline train` starts; its replicas attach to the reward service."""

    name: str = Field(pattern=r"^[\w.-]+$", description="What its component is called in metrics.")
    path: str = Field(description="Folder with the model and its tokenizer.")
    kind: Literal["sequence_classification", "process", "generative"] = Field(
        "sequence_classification",
        description="sequence_classification: a model with one label, whose value at the end of the "
        "conversation is the score. process: a model for token classification with one label; its value at "
        "the end of each step of the response is the step's value. The score is the mean of these, and each "
        "step's share of it is the reward of the step's last token. generative: a judge, a language model "
        "that is asked for a grade.",
    )
    engine: Literal["transformers", "vllm"] = Field(
        "transformers",
        description="sequence_classification: what computes the scores. vllm: vLLM's pooling runner, in the "
        "model's own process; device: cpu needs vLLM's build for CPUs.",
    )
    step_separator: str = Field("\n", min_length=1, description="process: what ends a step of a response.")
    prompt_file: str | None = Field(
        None,
        description="generative: a text with {prompt}, {response}, {ground_truth}, {data_source} or a column "
        "of data.extra_keys, which are filled in; on the hosts of the model.",
    )
    pattern: str = Field(
        NUMBER,
        description="generative: regular expression whose last match in the answer has the grade as its "
        "first group.",
    )
    words: dict[str, float] = Field(
        {}, description="generative: grades of words that the group may match: {yes: 1, no: 0}, in any case."
    )
    max_tokens: int = Field(256, gt=0, description="generative: longest answer.")
    device: str = Field(
        "cpu",
        pattern=r"^(cpu|cuda:\d+)$",
        description="cpu, or cuda:N for GPU N of this machine; each further replica has the next GPU.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Of the weights; the score itself is computed in float32."
    )
    replicas: int = Field(1, gt=0, description="Processes, which share the load.")
    threads: int = Field(1, gt=0, description="CPU: torch threads per replica.")
    max_batch_tokens: int = Field(16384, gt=0, description="Most tokens at a time, padding counted.")
    timeout_s: float = Field(
        120.0,
        gt=0,
        description="A replica that has had a response for longer loses it to another replica; one that "
        "works on a batch for longer ends, and is started again.",
    )
    wait_for_s: float = Field(
        600.0,
        gt=0,
        description="How long a response waits for a replica to take it; also the longest time that loading "
        "the model may take.",
    )

    @model_validator(mode="after")
    def _asks_what_it_is_told(self) -> Self:
        if self.kind == "generative" and self.prompt_file is None:
            raise ValueError(
                f"the reward model {self.name!r} is a judge (kind: generative): set prompt_file, the text "
                "with {response} that it is asked"
            )
        fields = type(self).model_fields
        keys = ("prompt_file", "pattern", "words", "max_tokens")
        given = [key for key in keys if getattr(self, key) != fields[key].default]
        if self.kind != "generative" and given:
            raise ValueError(
                f"the reward model {self.name!r} has kind: {self.kind}, where {', '.join(given)} would have "
                "no effect: set kind: generative for a judge, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _has_an_engine(self) -> Self:
        if self.engine == "vllm" and self.kind != "sequence_classification":
            raise ValueError(
                f"the reward model {self.name!r} has kind: {self.kind}, which vLLM's pooling runner does not "
                "compute here: set engine: transformers"
            )
        return self

    @model_validator(mode="after")
    def _places_what_it_scores(self) -> Self:
        if self.kind == "process" and self.normalize is not None:
            raise ValueError(
                f"the reward model {self.name!r} places parts of its reward on tokens (kind: process), which "
                "cannot be normalised: remove normalize, or scale it by weight"
            )
        return self

    @property
    def devices(self) -> tuple[int, ...]:
        """The replicas' GPUs; none on a CPU."""
        if self.device == "cpu":
            return ()
        first = int(self.device.removeprefix("cuda:"))
        return tuple(range(first, first + self.replicas))

    @property
    def attached(self) -> AttachedConfig:
        """The name under which its replicas attach."""
        shared = {name: getattr(self, name) for name in OutsideConfig.model_fields}
        return AttachedConfig(name=self.name, timeout_s=self.timeout_s, wait_for_s=self.wait_for_s, **shared)


class JudgeConfig(OutsideConfig):
    """A language model behind an OpenAI-compatible address that is asked for a grade."""

    name: str = Field(description="What its component is called in metrics.")
    address: str = Field(
        pattern=r"^https?://", description="URL with the version at its end: http://127.0.0.1:8000/v1."
    )
    model: str = Field(description="The model, as its server calls it.")
    prompt_file: str = Field(
        description="A text with {prompt}, {response}, {ground_truth}, {data_source} or a column of "
        "data.extra_keys, which are filled in; on the hosts of the run's reward service."
    )
    pattern: str = Field(
        NUMBER,
        description="Regular expression whose last match in the answer has the grade as its first group.",
    )
    words: dict[str, float] = Field(
        {}, description="Grades of words that the group may match: {yes: 1, no: 0}, in any case."
    )
    key_env: str | None = Field(
        None, description="Environment variable of the reward service that holds the API key."
    )
    max_tokens: int = Field(256, gt=0, description="Longest answer.")
    temperature: float = Field(0.0, ge=0, description="At which answers are drawn.")
    concurrency: int = Field(16, gt=0, description="Calls at once.")
    per_minute: float | None = Field(None, gt=0, description="Most calls per minute; null: no limit.")
    attempts: int = Field(
        4, gt=0, description="Most calls for a response; those that find the judge busy or away are repeated."
    )
    timeout_s: float = Field(60.0, gt=0, description="Longest time for one call.")


class CodeConfig(OutsideConfig):
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
    """Sets the scorers and their limits. The reward is the weighted sum over all of them."""

    functions: tuple[RewardFunctionConfig, ...] = Field(
        (), description="Functions, called in child processes that can be killed."
    )
    services: tuple[RewardServiceConfig, ...] = Field((), description="Remote scorers.")
    attached: tuple[AttachedConfig, ...] = Field((), description="Scorers that attach to the reward service.")
    models: tuple[RewardModelConfig, ...] = Field(
        (), description="Reward models, each in processes of its own that `paceline train` starts."
    )
    judges: tuple[JudgeConfig, ...] = Field((), description="Language models that are asked for a grade.")
    environment_weight: float = Field(
        1.0,
        description="Factor in the sum of the reward that an episode's environment gives, if it gives one.",
    )
    code: tuple[CodeConfig, ...] = Field((), description="Scorers that run the program in a response.")
    num_processes: int = Field(1, gt=0, description="Child processes that call the functions.")
    max_processes: int | None = Field(
        None,
        gt=0,
        description="Largest number of child processes. Another one starts while the queue holds more than "
        "three seconds of work for those that run, and ends after a minute without work. "
        "null: num_processes.",
    )
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
        description="How often a response is given to the reward services, before a timeout, a crash or an "
        "unreachable service counts as its error.",
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
        kinds = (self.functions, self.services, self.attached, self.models, self.judges, self.code)
        return any(kinds)

    @property
    def function_names(self) -> list[str]:
        """The names of the functions' components.

        A built-in's component has its name, a user's function's the name after the colon. A name that metrics
        already use gets a suffix (`reward_function`), and one that occurs again a number (`gsm8k_2`).
        """
        seen, names = Counter[str](), []
        for function in self.functions:
            name = function.name.rpartition(":")[2]
            name = f"{name}_function" if name in TOTALS else name
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
        return names

    @property
    def has_groups(self) -> bool:
        """Whether anything scores the samples of a prompt together."""
        return any(scorer.group for scorer in (*self.functions, *self.services, *self.attached))

    @property
    def model_gpus(self) -> frozenset[int]:
        """GPUs of this machine that reward models have."""
        return frozenset(gpu for model in self.models for gpu in model.devices)

    @model_validator(mode="after")
    def _remembers_no_groups(self) -> RewardConfig:
        outside: tuple[RewardServiceConfig | AttachedConfig, ...] = (*self.services, *self.attached)
        for scorer in outside:
            if scorer.group and scorer.cache_size:
                raise ValueError(
                    f"{scorer.name} has group: true and cache_size={scorer.cache_size}: a score that depends "
                    "on a response's siblings cannot be remembered; remove one of them"
                )
        return self

    @model_validator(mode="after")
    def _has_range(self) -> RewardConfig:
        if self.min_reward >= self.max_reward:
            raise ValueError(f"min_reward={self.min_reward} must be below max_reward={self.max_reward}")
        if self.max_processes is not None and self.max_processes < self.num_processes:
            raise ValueError(
                f"max_processes={self.max_processes} is below num_processes={self.num_processes}: raise it, "
                "or lower num_processes"
            )
        return self
