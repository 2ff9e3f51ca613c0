"""`reward.*`: how responses are scored."""

from __future__ import annotations

from collections import Counter
from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.core.scoring import MAX_ITEMS_PER_CALL

NUMBER = r"(-?\d+(?:\.\d+)?)"
"""Regular expression for a judge's grade that is a number."""

TOTALS = frozenset({"reward", "response_length", "greedy_answers"})
"""Names that metrics use for totals, and no component may have: `val/reward/mean` is of the weighted sums."""


class ShapedConfig(Section):
    """The options of all scorers: how their value enters the sum."""

    weight: float = Field(1.0, description="Factor of the scorer's value in the sum.")
    min_value: float | None = Field(
        None,
        description="Smaller values are raised to this bound in the sum; null: no bound. The component in "
        "the metrics is not clipped.",
    )
    max_value: float | None = Field(
        None, description="Larger values are lowered to this bound in the sum; null: no bound."
    )
    normalize: Literal["batch"] | None = Field(
        None,
        description="batch: in training, the clipped value is normalised before it is weighted: the mean "
        "over the step's batch is subtracted, and the result is divided by the standard deviation. null: no "
        "normalisation.",
    )
    data_sources: tuple[str, ...] = Field(
        (), description="The scorer scores only rows of these data sources; empty: all rows."
    )
    where: dict[str, tuple[str, ...]] = Field(
        {},
        description="The scorer scores only rows whose columns have one of these values, as text: {level: "
        "[hard, harder]}; the columns must be in data.extra_keys.",
    )
    weight_key: str | None = Field(
        None,
        description="Column of data.extra_keys with a further factor of the scorer's value, per row; null: "
        "none.",
    )
    required: bool = Field(
        True,
        description="true: a response that the scorer could not score has no reward. false: the missing "
        "value counts as 0, and the component NAME/failed shows how often that happens.",
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
        description="The scorer gets all samples of a prompt in one call and returns one value for each: "
        "f(items: list[ScoreItem]) -> list.",
    )


class OutsideConfig(ShapedConfig):
    """The options of all scorers other than functions."""

    name: str = Field(description="Name of its component in metrics.")
    cache_size: int = Field(
        0,
        ge=0,
        description="Most scores that each reward service caches, by response, prompt and row, so that the "
        "same response is not scored again. 0: no cache; leave it at 0 for a scorer whose answers are "
        "sampled.",
    )


class GroupedOutsideConfig(GroupedConfig, OutsideConfig):
    """The options of scorers other than functions that can score the samples of a prompt together."""

    @model_validator(mode="after")
    def _remembers_no_groups(self) -> Self:
        if self.group and self.cache_size:
            raise ValueError(
                f"{self.name} has group: true and cache_size={self.cache_size}: a score that depends on a "
                "response's siblings cannot be remembered; remove one of them"
            )
        return self


class RewardFunctionConfig(GroupedConfig, ShapedConfig):
    """A function `f(response, ground_truth, **extra) -> float | dict[str, float]`."""

    name: str = Field(
        description="Name of a built-in, module:function, or path/to/file.py:function. Functions with the "
        "signatures of verl or TRL work unchanged (docs/from-verl-and-trl.md)."
    )
    kwargs: dict[str, bool | int | float | str | None] = Field(
        {}, description="Further keyword arguments for every call."
    )


class RewardServiceConfig(GroupedOutsideConfig):
    """A remote scorer that serves paceline.rpc.v1.RewardService."""

    address: str = Field(description="host:port.")
    max_items_per_call: int = Field(256, gt=0, le=MAX_ITEMS_PER_CALL, description="Largest request.")
    concurrency: int = Field(16, gt=0, description="Most concurrent requests.")
    timeout_s: float | None = Field(
        None, gt=0, description="Longest time for one request; null: reward.timeout_s."
    )
    retry_for_s: float = Field(
        30.0,
        ge=0,
        description="How long a request is repeated after the delivery of its responses if it does not reach "
        "the service, if the service is too busy, or if it takes too long. 0: never.",
    )
    token_file: str | None = Field(
        None,
        description="File, on the hosts of the run's reward services, with the token that the service "
        "requires. null: the run's own token is sent.",
    )
    tls: bool | None = Field(
        None,
        description="true: calls use TLS. false: calls are not encrypted, and a token is sent only to "
        "addresses of this machine unless service.insecure is set. null: TLS if the run's reward services "
        "have TLS files (PACELINE_TLS_DIR).",
    )
    tls_dir: str | None = Field(
        None,
        description="Folder, on the hosts of the run's reward services, with ca.pem of the authority that "
        "signed the service's certificate, and with cert.pem and key.pem if the service requires client "
        "certificates. null: the run's own.",
    )
    tls_name: str | None = Field(
        None,
        description="Name that the service's certificate must have. null: reward.paceline, which `paceline "
        "certs issue` writes.",
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


class AttachedConfig(GroupedOutsideConfig):
    """A name under which clients attach to the reward service (`paceline.sdk.attach_reward`)."""

    name: str = Field(
        description="Name under which clients attach; also the name of the component in metrics."
    )
    timeout_s: float | None = Field(
        None,
        gt=0,
        description="Time after which a response that a client has not scored goes to another client; null: "
        "reward.timeout_s.",
    )
    wait_for_s: float = Field(
        60.0,
        ge=0,
        description="How long a response waits for a client to take it before it counts as an error.",
    )


class RewardModelConfig(OutsideConfig):
    """A reward model that `paceline train` starts; its replicas attach to the reward service."""

    name: str = Field(pattern=r"^[\w.-]+$", description="Name of its component in metrics.")
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
    step_separator: str = Field(
        "\n", min_length=1, description="process: the text that ends a step of a response."
    )
    prompt_file: str | None = Field(
        None,
        description="generative: file, on the hosts of the model, with the judge's prompt; {prompt}, "
        "{response}, {ground_truth}, {data_source} and columns of data.extra_keys in it are filled in.",
    )
    pattern: str = Field(
        NUMBER,
        description="generative: regular expression for the grade, which is the first group of its last "
        "match in the answer.",
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
        "float32", description="Type of the weights; the score itself is computed in float32."
    )
    replicas: int = Field(1, gt=0, description="Processes, which share the load.")
    threads: int = Field(1, gt=0, description="CPU: torch threads per replica.")
    max_batch_tokens: int = Field(16384, gt=0, description="Most tokens of a batch, padding included.")
    timeout_s: float = Field(
        120.0,
        gt=0,
        description="Time after which a response that a replica has not scored goes to another replica; a "
        "replica that works on one batch for longer is restarted.",
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
                f"the reward model {self.name!r} is a judge (kind: generative): set prompt_file, its "
                "prompt with {response}"
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
        return AttachedConfig(timeout_s=self.timeout_s, wait_for_s=self.wait_for_s, **shared)


class JudgeConfig(OutsideConfig):
    """A language model behind an OpenAI-compatible address that is asked for a grade."""

    address: str = Field(
        pattern=r"^https?://", description="URL with the version at its end: http://127.0.0.1:8000/v1."
    )
    model: str = Field(description="The model, as its server calls it.")
    prompt_file: str = Field(
        description="File, on the hosts of the run's reward service, with the judge's prompt; {prompt}, "
        "{response}, {ground_truth}, {data_source} and columns of data.extra_keys in it are filled in."
    )
    pattern: str = Field(
        NUMBER,
        description="Regular expression for the grade, which is the first group of its last match in the "
        "answer.",
    )
    words: dict[str, float] = Field(
        {}, description="Grades of words that the group may match: {yes: 1, no: 0}, in any case."
    )
    key_env: str | None = Field(
        None, description="Environment variable of the reward service that holds the API key."
    )
    max_tokens: int = Field(256, gt=0, description="Longest answer.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature of the judge's answers.")
    concurrency: int = Field(16, gt=0, description="Most concurrent calls.")
    per_minute: float | None = Field(None, gt=0, description="Most calls per minute; null: no limit.")
    attempts: int = Field(
        4,
        gt=0,
        description="Most calls for one response; a call is repeated if the judge is busy or unreachable.",
    )
    timeout_s: float = Field(60.0, gt=0, description="Longest time for one call.")


class CodeConfig(OutsideConfig):
    """Runs the program in a response, in a sandbox, against the tests in its row's ground truth."""

    command: tuple[str, ...] = Field(
        (),
        description="Absolute path and arguments of the command that runs the program; {file} stands for the "
        "program's file. Empty: Python.",
    )
    file: str = Field("program.py", pattern=r"^[\w.-]+$", description="Name of the program's file.")
    read_only: tuple[str, ...] = Field(
        (), description="Folders that programs can read besides the system's and Python's."
    )
    test_timeout_s: float = Field(10.0, gt=0, description="Longest time for one test.")
    memory_mib: int = Field(512, gt=0, description="Most memory of each process of a program.")
    max_processes: int = Field(8, gt=0, description="Most processes and threads of a program at a time.")
    concurrency: int = Field(2, gt=0, description="Programs that run at a time.")


class ScorersConfig(Section):
    """Scorers that need no processes of their own from `paceline train`; the reward is their weighted sum."""

    functions: tuple[RewardFunctionConfig, ...] = Field(
        (), description="Functions; they are called in child processes, which can be killed."
    )
    services: tuple[RewardServiceConfig, ...] = Field((), description="Remote scorers.")
    judges: tuple[JudgeConfig, ...] = Field((), description="Language models that are asked for a grade.")
    code: tuple[CodeConfig, ...] = Field((), description="Scorers that run the program in a response.")
    environment_weight: float = Field(
        1.0,
        description="Factor in the sum for the reward of an episode's environment, if the environment gives "
        "one.",
    )

    @property
    def has_scorer(self) -> bool:
        """Whether anything scores responses; an episode's environment may do it in their place."""
        return bool(self.named_scorers)

    @property
    def named_scorers(self) -> dict[str, ShapedConfig]:
        """The scorers by the names of their components, functions first."""
        named: dict[str, ShapedConfig] = dict(zip(self.function_names, self.functions, strict=True))
        named |= {scorer.name: scorer for scorer in (*self.services, *self.judges, *self.code)}
        return named

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


class RewardConfig(ScorersConfig):
    """Sets the scorers and their limits. The reward is the weighted sum over all of them."""

    attached: tuple[AttachedConfig, ...] = Field((), description="Scorers that attach to the reward service.")
    models: tuple[RewardModelConfig, ...] = Field(
        (), description="Reward models, each in processes of its own that `paceline train` starts."
    )
    num_processes: int = Field(1, gt=0, description="Child processes that call the functions.")
    max_processes: int | None = Field(
        None,
        gt=0,
        description="Largest number of child processes. Another process starts while the queue holds more "
        "than three seconds of work for the running ones; it ends after a minute without work. null: "
        "num_processes.",
    )
    memory_mib: int | None = Field(
        8192,
        gt=0,
        description="Most memory of a child process, and of each process that it starts; null: no limit.",
    )
    pass_env: tuple[str, ...] = Field(
        (),
        description="Environment variables of the reward service that functions see besides the common ones, "
        "for instance API keys.",
    )
    timeout_s: float = Field(
        10.0, gt=0, description="Longest time for one item, or for one request to a service."
    )
    max_deliveries: int = Field(
        4,
        gt=0,
        description="Most attempts to score a response; after these, a timeout, a crash or an unreachable "
        "service counts as the response's error.",
    )
    min_reward: float = Field(-1e6, description="A smaller sum counts as an error.")
    max_reward: float = Field(1e6, description="A larger sum counts as an error.")
    max_dropped_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Largest share of a step's prompt groups that may be dropped because of reward errors; "
        "beyond it the run ends.",
    )

    def with_scorers(self, scorers: ScorersConfig) -> RewardConfig:
        """Returns a copy with these scorers alone, and with the same limits."""
        own = {name: getattr(scorers, name) for name in ScorersConfig.model_fields}
        return self.model_copy(update={**own, "attached": (), "models": ()})

    @property
    def named_scorers(self) -> dict[str, ShapedConfig]:
        """The scorers by the names of their components, functions first."""
        return super().named_scorers | {scorer.name: scorer for scorer in (*self.attached, *self.models)}

    @property
    def has_groups(self) -> bool:
        """Whether anything scores the samples of a prompt together."""
        return any(scorer.group for scorer in (*self.functions, *self.services, *self.attached))

    @property
    def model_gpus(self) -> frozenset[int]:
        """GPUs of this machine that reward models have."""
        return frozenset(gpu for model in self.models for gpu in model.devices)

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
