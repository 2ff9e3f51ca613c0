"""`model.*`: the policy's folder and how it computes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.core.errors import ConfigError
from paceline.core.policy import TrainedVision


class ModelPaths(Section):
    """Where a service finds the model on its own host; null: model.path."""

    controller: str | None = Field(None, description="Folder with the tokenizer and config.json.")
    rollout: str | None = Field(None, description="Folder with config.json; weights come by push.")
    learner: str | None = Field(None, description="Folder with config.json, weights and tokenizer.")
    reward: str | None = Field(None, description="Folder with the tokenizer.")


class LoraConfig(Section):
    """Low-rank adapters: each target W computes (W + (alpha / rank) B A) x, and only A and B train."""

    rank: int = Field(16, gt=0, description="Rows of A and columns of B.")
    alpha: float = Field(32.0, gt=0, description="B A is multiplied by alpha / rank.")
    targets: tuple[str, ...] = Field(
        ("all",),
        min_length=1,
        description="Linear layers and experts, by the last part of their names ([q_proj, v_proj], experts: "
        "[gate_up_proj, down_proj]); all: every linear layer and all experts of the decoder.",
    )

    def require_room(self, layer: str, inputs: int, outputs: int) -> None:
        """Checks the rank against a layer that gets an adapter.

        Raises:
            ConfigError: the rank is above the layer's smaller side.
        """
        most = min(inputs, outputs)
        if self.rank > most:
            raise ConfigError(
                f"model.lora.rank={self.rank} is above the smaller side of {layer}, which has {outputs} rows "
                f"and {inputs} columns: its update has a rank of at most {most}, so more would only take "
                f"memory; set model.lora.rank to {most} or less, or leave the layer out of model.lora.targets"
            )


class VisionConfig(Section):
    """The policy's vision tower, which turns the images of prompts into states of tokens."""

    train: TrainedVision = Field(
        "none",
        description="Which part of the tower trains with the language model. none: it is frozen; projector: "
        "only the mergers, which project the states of patches to the width of the language model; all: the "
        "entire tower. It needs data.image_key, and does not go with model.lora.",
    )

    def require_images(self, image_key: str | None) -> None:
        """Checks that a tower that trains gets images.

        Raises:
            ValueError: `data.image_key` is not set.
        """
        if self.train != "none" and image_key is None:
            raise ValueError(
                f"model.vision.train={self.train} trains on the images of prompts, and there are none; set "
                "data.image_key to the column that names them, or leave model.vision out"
            )


class ModelConfig(Section):
    """The policy: a folder in the Hugging Face layout."""

    path: str = Field(
        description="Folder with config.json, weights (safetensors) and tokenizer: a path; an fsspec URL "
        "(s3://BUCKET/MODEL), of which each service makes a local copy; or a name on the Hugging Face hub, "
        "ORG/NAME[@REVISION], which each service fetches (docs/models.md)."
    )
    paths: ModelPaths = ModelPaths()
    tokenizer_path: str | None = Field(
        None, description="Folder with the tokenizer, where it is not model.path."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type of the forward pass, on learner and rollout servers, and of the weights in a push; "
        "master weights are float32. If it is left out, `paceline train` and `sft` use bfloat16 on GPUs, "
        "unless the stored weights are float32.",
    )
    load_format: Literal["auto", "random"] = Field(
        "auto", description="random: ignore the weights on disk and draw them from the seed (benchmarks)."
    )
    trust_architecture: bool = Field(
        False,
        description="Accept an architecture that is not in the table of docs/models.md, if the "
        "self-test of `paceline check`, which the learner runs at its start, passes.",
    )
    lora: LoraConfig | None = Field(
        None,
        description="Adapters on the policy, whose own weights are then frozen in model.dtype; null: all "
        "weights train. Adapters need about ten times the learning rate. The critic, if there is one, always "
        "trains all its weights.",
    )
    vision: VisionConfig = VisionConfig()
    cache_gib: float = Field(
        500.0,
        gt=0,
        description="Largest size of the local copies of URLs on a machine, in PACELINE_CACHE_DIR "
        "(~/.cache/paceline); the least recently used copies are removed first.",
    )

    @model_validator(mode="after")
    def _adapters_leave_the_tower_frozen(self) -> Self:
        if self.lora is not None and self.vision.train != "none":
            raise ValueError(
                f"model.vision.train={self.vision.train} does not go with model.lora: the reference is the "
                "policy with its adapters off, and would see the trained tower; leave one of them out"
            )
        return self
