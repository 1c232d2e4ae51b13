"""The types of params.yaml: one frozen model per section. `load` is the only reader of the file."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    SerializeAsAny,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from nightshift import plugins
from nightshift.errors import ConfigError

Count = Annotated[int, Field(ge=1, strict=True)]
Natural = Annotated[int, Field(ge=0, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(gt=0, lt=1, strict=True)]
ShareOrZero = Annotated[float, Field(ge=0, lt=1, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(min_length=1)]


def _unique(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("contains a name twice")
    return names


def is_address(value: str) -> bool:
    """Whether it is HOST:PORT; an IPv6 host may be in brackets."""
    host, _, port = value.rpartition(":")
    return bool(host and re.fullmatch("[0-9]{1,5}", port)) and int(port) <= _MAX_PORT


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _address(value: str) -> str:
    if not is_address(value):
        raise ValueError(f"should be HOST:PORT with a port from 0 to {_MAX_PORT}")
    return value


def _address_or_none(value: str) -> str:
    return _address(value) if value else value


_MAX_PORT = 65535
Imitate = Literal["none", "better", "all"]
Names = Annotated[tuple[Name, ...], AfterValidator(_unique)]


def _known(group: str, built_in: tuple[str, ...], value: str) -> str:
    """A name of ours, or of an entry point; those are looked up only where a file names one."""
    if value not in built_in and value not in (others := plugins.find(group, built_in)):
        raise ValueError(f"should be one of {', '.join([*built_in, *others])}")
    return value


Algorithm = Literal["rloo", "rlpd"]
"""The training stages that can be chosen, each a stage of this name. The clone (sft) is always trained."""
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
Algorithms = Annotated[tuple[Algorithm, ...], AfterValidator(_unique)]

Start = Literal["scratch", "champion"]
"""What the weights of a policy are before it is trained."""
START, SCRATCH = "start", "scratch"
CHAMPION = "champion"
"""The alias of the best version in the registry, and the name of its policy in an evaluation."""
CHAMPION_LEFT_OUT = "champion_left_out"
"""In files of the stages `opponent` and `evaluate`: the version that was champion, and why it cannot play, in words."""


def skip_reason(stage: str) -> str:
    """Why a stage that is skipped is."""
    return f"{START}: {SCRATCH}" if stage == START else "not in algorithms"


Auto = Literal["auto"]
"""Let the evaluation protocol say."""


def _count_or_auto(value: Any) -> Any:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise ValueError("should be a whole number from 1 on, or auto")


CountOrAuto = Annotated[int | Auto, BeforeValidator(_count_or_auto)]


class _ByName(dict[str, Any]):
    """Sections are keys of caches, so they have to have a hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def _size_or_sizes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {camera: _size_of(camera, size) for camera, size in value.items()}
    try:
        return _count_or_auto(value)
    except ValueError as error:
        raise ValueError(f"{error}, or one of these for each camera") from None


def _size_of(camera: str, value: Any) -> Any:
    try:
        return _count_or_auto(value)
    except ValueError as error:
        raise ValueError(f"{camera}: {error}") from None


def _hashable(value: Any) -> Any:
    return _ByName(value) if isinstance(value, dict) else value


SizeOrSizes = Annotated[int | Auto | dict[str, int | Auto], BeforeValidator(_size_or_sizes), AfterValidator(_hashable)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckpointEvery(Section):
    """How much work is between two checkpoints; the last step always makes one."""

    sft_steps: Count
    """Gradient steps between checkpoints; the validation loss, if demos are held back, is logged as often."""
    rloo_iterations: Count
    """Iterations between checkpoints."""
    rlpd_decisions: Count
    """Decisions between checkpoints."""


class Machine(Section):
    """How to run; in no cache key. The computation is the same, and results differ by its rounding at most: by order of
    sums (ranks, microbatch_size, microbatch_tokens), and by bfloat16 and shared batches (device: cuda)."""

    device: Literal["auto", "cpu", "cuda"]
    """Where policies act and learn; auto is cuda where there is a GPU."""
    workers: Natural
    """Processes that simulate: on Ray or, where it is not installed, on this machine. 0: this process, and for demos as
    many others as there are threads."""
    threads: Count
    """Threads of each simulator process that step simulations, of one request or of several."""
    requests_at_once: Count
    """Requests (groups of episodes) that one simulator process plays side by side. On a GPU they share a batch."""
    actors: Natural
    """Processes that play for rlpd and send their episodes over a stream; 0 plays with the simulators above."""
    listen: Annotated[str, AfterValidator(_address_or_none)]
    """HOST:PORT where the learner of rlpd takes actors of other machines, too; empty: this machine's only."""
    page: Annotated[str, AfterValidator(_address)]
    """HOST:PORT of the web page where a person takes over (rlpd.interventions.source: browser); port 0 = a free one."""
    page_patience_s: NonNegative
    """An episode that the pilot of this page has stopped goes on with the policy after so many seconds in which they
    press nothing; 0 = never. Simulators alone: on a robot a stop lasts until somebody resumes."""
    ranks: Count
    """Learner processes that share each update of cloning (sft) and of rloo."""
    placement: Literal["colocated", "apart"] = "colocated"
    """Of sft and rloo: whether workers act on the GPUs that ranks learn on, or on others. Apart, the learner has a
    process and a GPU of its own also if ranks is 1."""
    strategy: Literal["data_parallel", "fsdp"]
    """What each of several ranks holds: the whole policy, or with FSDP2 a part of every weight, gradient and moment."""
    cpu_offload: Flag
    """With fsdp: weights, gradients and moments stay in the memory of the CPU, and a block is on the GPU while it is
    computed."""
    free_disk_gb: NonNegative
    """A run is refused while the disk of the project, of DVC's cache or of Ray's temporary folder has less room than
    this."""
    microbatch_size: Count
    """Of sft and rloo: decisions per backward pass; lower it when memory runs out. Gradients are accumulated over a
    minibatch."""
    microbatch_tokens: Count | None = None
    """Tokens per backward pass instead, for policies that are transformers: as many decisions as they have room for,
    each with the longest prompt. null = microbatch_size counts."""
    gradient_checkpointing: Flag
    """Of sft and rloo: compute the activations of transformer blocks again in the backward pass: less memory, a third
    more time."""
    compile: Flag
    """Compile transformer blocks, or a whole `vla` (torch.compile), at the first call: where policies act, and in sft
    and rloo where they learn."""
    checkpoint_every: CheckpointEvery

    @model_validator(mode="after")
    def _consistent(self) -> Machine:
        if self.threads > 1 and self.requests_at_once == 1:
            raise ValueError(
                f"threads is {self.threads} and requests_at_once is 1: one request at a time is played in one thread, "
                "so raise requests_at_once or set threads to 1"
            )
        if self.strategy == "fsdp" and self.ranks == 1 and not self.cpu_offload:
            raise ValueError(
                "strategy is fsdp, and ranks is 1, which leaves nothing to shard: set ranks to the number of GPUs, "
                "cpu_offload to true, or strategy to data_parallel"
            )
        if self.placement == "apart" and not self.workers:
            raise ValueError(
                "placement is apart, and with workers 0 the process that learns also plays: set workers to 1 or more, "
                "or placement to colocated"
            )
        if self.cpu_offload and self.strategy != "fsdp":
            raise ValueError(
                f"cpu_offload is true, and with strategy {self.strategy} nothing is offloaded: set strategy to fsdp, "
                "or cpu_offload to false"
            )
        if self.listen and not self.actors:
            raise ValueError(
                f"listen is {self.listen}, and with actors 0 no learner takes actors of other machines: "
                'set actors to 1 or more, or listen to ""'
            )
        return self

    @property
    def page_address(self) -> tuple[str, int]:
        return host_and_port(self.page)

    @property
    def simulator_cpus(self) -> int:
        """That all workers reserve on Ray."""
        return self.workers * self.threads

    @property
    def has_rank_processes(self) -> bool:
        """Whether learners are processes of their own, with a GPU each where there are any."""
        return self.ranks > 1 or self.strategy == "fsdp" or self.placement == "apart"


class Cameras(Section):
    """What is drawn for policies and recorded in demos."""

    names: Names
    """Cameras of the suite; empty draws nothing."""
    size: SizeOrSizes
    """Pixels of an image, which is square: of all cameras, or of each by its name; auto takes the protocol's."""
    shadows: Flag
    """Shadows and reflections, as LIBERO draws them; without them a GPU draws about ten times as fast."""

    @model_validator(mode="after")
    def _every_camera_has_a_size(self) -> Cameras:
        if isinstance(self.size, Mapping):
            missing, unknown = set(self.names) - self.size.keys(), self.size.keys() - set(self.names)
            if missing:
                raise ValueError(f"size has none for {', '.join(sorted(missing))}: give one for every camera of names")
            if unknown:
                raise ValueError(f"size has one for {', '.join(sorted(unknown))}: add it to names, or remove it")
        return self

    def size_of(self, camera: str) -> int | Auto:
        return self.size[camera] if isinstance(self.size, Mapping) else self.size


Point = tuple[float, float, float]


class RobotScale(Section):
    """What an action of 1 stands for in one control step, along or about one axis."""

    position: Positive
    """Metres."""
    rotation: Positive
    """Radians."""


class RobotLimits(Section):
    """At most what the server allows. Targets are clipped to them; a measured state beyond them stops the robot."""

    box_low: Point
    """Lower corner of the safety box, in metres."""
    box_high: Point
    """Its upper corner."""
    max_turn: Positive
    """Radians between a target's orientation and that after the reset."""
    linear_speed: Positive
    """Metres per second."""
    angular_speed: Positive
    """Radians per second."""
    force: Positive
    """Newtons at the hand."""
    torque: Positive
    """Newton metres at the hand."""

    @model_validator(mode="after")
    def _consistent(self) -> RobotLimits:
        if not all(low < high for low, high in zip(self.box_low, self.box_high, strict=True)):
            raise ValueError("box_low is not below box_high: give two opposite corners")
        return self


Compliance = Annotated[dict[str, Annotated[float, Field(allow_inf_nan=False, strict=True)]], AfterValidator(_ByName)]


class Robot(Section):
    """The server of the suite robot, and what the client expects of it."""

    url: Annotated[str, Field(pattern=r"^https?://[^/]+$")]
    """Its address."""
    description: Annotated[str, Field(pattern=r"^robot-[0-9a-f]{12}$")]
    """Digest of what the server says of itself: `nightshift robot check` prints it."""
    scale: RobotScale
    limits: RobotLimits
    deadline_s: Positive
    """Seconds in which a command has to be answered, with all its attempts; later the episode is invalid."""
    attempts: Count
    """How often a command is sent, each time with the same sequence number, in equal parts of the deadline."""
    reset_deadline_s: Positive
    """Seconds in which the robot has to be back at a start."""
    image_age_s: Positive
    """Seconds by which a camera image may be older than the state that comes with it."""
    reset: Literal["script", "person"]
    """Who puts everything back: the server by itself, or a person who is asked to."""
    success: Literal["server", "person", "none"]
    """Who says that the task is done; none: a success classifier (rlpd.reward) looks at the episodes of training and
    validation afterwards, and a person is asked in evaluation."""
    answer_within_s: Positive
    """Seconds that a person has to answer; later the run ends."""
    compliance: Compliance = _ByName()
    """Numbers of the arm's controller by the server's own names, such as stiffness; sent before every episode and
    whenever a person resumes one."""


class Randomisation(Section):
    """Domain randomisation: demos, episodes of training and validation are played in perturbed worlds
    (docs/robustness.md); the evaluation is not."""

    perturbations: Annotated[Names, Field(min_length=1)]
    """Applied to every episode, in this order: `nightshift robustness --list` shows them."""
    strength: Annotated[float, Field(gt=0, le=5, strict=True)]
    """The highest; that of an episode is drawn uniformly below it, for each perturbation."""


class Env(Section):
    """What is simulated."""

    suite: Name
    """The simulator's set of tasks: `nightshift env list`."""
    tasks: Names
    """A subset of the suite; empty means all of it."""
    protocol: Name
    """Which published way of playing LIBERO; envs/protocols.py has the table."""
    horizon: CountOrAuto
    """Control steps until an episode counts as failed; auto takes the protocol's for the suite."""
    cameras: Cameras
    robot: Robot | None = None
    """Of the suite robot, and of no other."""
    randomisation: Randomisation | None = None
    """Of the worlds that demos, training and validation are played in; not given = none."""

    @model_validator(mode="after")
    def _consistent(self) -> Env:
        if (self.suite == "robot") != (self.robot is not None):
            raise ValueError("the suite robot and the section env.robot belong together: give both or none")
        return self

    @property
    def is_judged(self) -> bool:
        """Whether success is reported in training: on a robot nobody may."""
        return self.robot is None or self.robot.success != "none"


class States(Section):
    """Init states for training and validation."""

    per_task: Count
    """Training init states drawn for each task of a suite that ships none."""
    validation_share: Share
    """Share of a task's training states that no demo and no RL group starts from: training stages validate on them."""


class Collect(Section):
    """Demos of the scripted expert."""

    demos_per_task: Count
    """Successful episodes of the expert per task; at least two where one of them is held back for validation."""
    attempts: Count
    """At most this many expert episodes per demo wanted."""
    disturbance: NonNegative
    """Standard deviation of noise on what the expert's hand does, not on what is recorded of the expert."""


class Dataset(Section):
    """What behaviour cloning learns from."""

    sources: Annotated[Names, Field(min_length=1)]
    """Where episodes come from: "demos" are those of the stage collect, any other name is an import."""
    validation_share: ShareOrZero
    """Share of the init states whose episodes are held back from behaviour cloning: of each task at least one, or none
    with 0."""


Inputs = Annotated[Names, Field(min_length=1)]
"""Names of the observations that a policy sees, in order."""
Sizes = Annotated[tuple[Count, ...], Field(min_length=1)]


GaussianHead = Literal["gaussian", "tanh_gaussian"]
"""The distribution of an action's dimension: a Gaussian in standard deviations of the demos, with one std for all
observations; or a Gaussian through tanh with a std for each observation, which rlpd needs."""


class GaussianMlp(Section):
    """An MLP on state vectors, with a Gaussian head."""

    family: Literal["gaussian_mlp"]
    """The kind of network: docs/policies.md; other packages add theirs (docs/extending.md)."""
    inputs: Inputs
    """Observations that the policy sees: docs/libero.md, What a policy can see."""
    hidden: Sizes
    """Widths of the hidden layers."""
    activation: Literal["tanh", "relu"]
    """Of the hidden layers."""
    layer_norm: Flag
    """Layer normalisation before every activation."""
    chunk: Count
    """Actions per decision: the policy looks, plays them all, and looks again."""
    head: GaussianHead
    """The distribution of an action's dimension: a Gaussian with one std; tanh_gaussian has one for each observation,
    which rlpd needs."""


class Augmentation(Section):
    """Random changes of camera images in behaviour cloning, different for every image of every batch."""

    crop: Natural
    """An image is shifted by up to this many pixels in each direction, a smaller camera's by fewer; 0 = not at all."""
    jitter: Annotated[float, Field(ge=0, lt=1, strict=True)]
    """Brightness, contrast and saturation are scaled by factors between 1 - jitter and 1 + jitter; 0 = not at all."""


class Cnn(Section):
    """A small convolutional network per camera, with a Gaussian head."""

    family: Literal["cnn"]
    inputs: Inputs
    channels: Sizes
    """Of the convolutions, each of which halves the image."""
    hidden: Sizes
    """Widths of the layers after the cameras' features, the state vectors and the instruction are joined; the first is
    also the number of features of each camera."""
    max_words: Count
    """The longest instruction."""
    chunk: Count
    head: GaussianHead
    augmentation: Augmentation


class Vla(Section):
    """A transformer over patches of every camera, words of the instruction, state vectors and action queries."""

    family: Literal["vla"]
    inputs: Inputs
    patch_size: Count
    """Pixels of a square patch, one token: the product of the strides of the convolutions that make it. It must divide
    the size of the images."""
    width: Count
    """Features of a token."""
    depth: Count
    """Transformer blocks."""
    heads: Count
    """Of attention; they must divide the width."""
    max_words: Count
    """The longest instruction."""
    chunk: Count
    head: GaussianHead | Literal["bins"]
    """As above, or 256 bins between the demos' minimum and maximum."""
    augmentation: Augmentation

    @model_validator(mode="after")
    def _consistent(self) -> Vla:
        if self.width % self.heads:
            raise ValueError(f"heads ({self.heads}) does not divide width ({self.width}): change one of them")
        return self


class FlowSde(Section):
    """Exploration by one step of an SDE that has the distribution of the flow's ODE."""

    noise_level: Positive
    """a in a√(t / (1 - t)), the noise of that step at the time t, which the temperature scales; 0.5 in pi_RL."""


class FlowNoise(Section):
    """Exploration by noise in every denoising step, with a std that a small network learns (rloo.learn_std)."""

    min_std: Positive
    """Lowest std, in the scale in which actions are denoised, which the temperature scales; 0.08 in pi_RL."""
    max_std: Positive
    """Highest std; 0.16 in pi_RL."""
    log_prob: Literal["sum", "mean"]
    """Of a decision, from those of its denoising steps: their sum is the log-density; pi_RL takes the mean."""

    @model_validator(mode="after")
    def _consistent(self) -> FlowNoise:
        if self.min_std >= self.max_std:
            raise ValueError(f"min_std ({self.min_std:g}) is not below max_std ({self.max_std:g})")
        return self


class Flow(Section):
    """The transformer of the family vla, with an action expert that denoises the chunk of actions (flow matching)."""

    family: Literal["flow"]
    inputs: Inputs
    patch_size: Count
    width: Count
    depth: Count
    """Transformer blocks, and as many of the action expert."""
    heads: Count
    max_words: Count
    chunk: Count
    denoising_steps: Count
    """From noise to actions, per decision."""
    flow_sde: FlowSde | None
    """Exploration by one denoising step of an SDE that has the distribution of the flow; null with flow_noise."""
    flow_noise: FlowNoise | None
    """Exploration by noise in every denoising step, whose std is learned (rloo.learn_std); null with flow_sde."""
    augmentation: Augmentation

    @property
    def head(self) -> Literal["flow_sde", "flow_noise"]:
        return "flow_noise" if self.flow_sde is None else "flow_sde"

    @model_validator(mode="after")
    def _consistent(self) -> Flow:
        if self.width % self.heads or self.width % 2:
            raise ValueError(f"width ({self.width}) is not even or no multiple of heads ({self.heads}): change it")
        _check_denoising(self)
        return self


def _check_denoising(policy: Flow | Pi0) -> None:
    if (policy.flow_sde is None) == (policy.flow_noise is None):
        raise ValueError("needs either flow_sde or flow_noise; the other one is null")
    if policy.flow_sde is not None and policy.denoising_steps == 1:
        raise ValueError("flow_sde needs denoising_steps of 2 or more: the noise of a single step is infinite")


class PublishedCheckpoint(Section):
    """Weights of OpenVLA-OFT or one of its variants, as they are published."""

    path: Name
    """A folder with safetensors, config.json, tokenizer.json, preprocessor_config.json and dataset_statistics.json."""
    adapter: Name | None
    """A folder with a LoRA adapter (peft) that is merged into them; null = none, or merged already."""
    unnorm_key: Name
    """The dataset whose statistics scale actions and state vectors, e.g. libero_10; with _no_noops if need be."""
    range: Literal["q01_q99", "min_max"]
    """Which of these statistics are scaled to -1 and 1."""


class Transformer(Section):
    width: Count
    """Features of a token."""
    mlp: Count
    """Width of the hidden layer of each MLP."""
    depth: Count
    """Blocks that are computed."""
    heads: Count
    """Of attention; they must divide the width."""

    @model_validator(mode="after")
    def _consistent(self) -> Transformer:
        if self.width % self.heads:
            raise ValueError(f"heads ({self.heads}) does not divide width ({self.width}): change one of them")
        return self


class OpenVlaOftSize(Section):
    """Of a network with random weights."""

    image_size: Count
    """Pixels that camera images are resized to; a multiple of 14, the size of a patch."""
    dinov2: Transformer
    siglip: Transformer
    llama: Transformer


class OpenVlaOftVariant(Section):
    """What checkpoints of this architecture differ in."""

    attention: Literal["bidirectional", "causal", "prefix"]
    """bidirectional: all tokens see all. causal: each sees those before it. prefix: images, state and prompt see each
    other; the last prompt token and all after it see everything."""
    stop_token: Flag
    """A stop token follows the places of the actions."""
    images: Literal["jpeg_lanczos_crop", "bicubic"]
    """A JPEG round trip, lanczos3 and a centre crop of 0.9 of the area; or bicubic alone."""


class Lora(Section):
    """Low-rank adapters (LoRA) of linear layers: they are trained, and the layers are not."""

    rank: Count
    """Of the two matrices whose product is the change."""
    alpha: Positive
    """The change of a layer is scaled by alpha / rank."""
    targets: Annotated[Names, Field(min_length=1)]
    """Names of linear layers in the parts that are trained: vision encoder, projectors, language model, expert."""


class OpenVlaOft(Section):
    """Two vision towers and Llama, which decodes a chunk of actions in parallel."""

    family: Literal["openvla-oft"]
    inputs: Inputs
    variant: Literal["openvla-oft", "simplevla-rl", "rlinf", "ript-vla"] | OpenVlaOftVariant
    """The project that trained the checkpoint, or its properties one by one."""
    checkpoint: PublishedCheckpoint | None
    """Published weights; null = random ones."""
    size: OpenVlaOftSize | None
    """Of random weights; null with a checkpoint."""
    max_tokens: Count
    """The longest prompt: the instruction and some twenty tokens around it."""
    chunk: Count
    head: Literal["tokens", "l1"]
    """256 tokens per action dimension, or actions regressed with the L1 loss, explored with a Laplace distribution."""
    dtype: Literal["float32", "bfloat16"]
    """Of the weights that are not trained: what is trained is float32."""
    lora: Lora | None
    """null = all weights are trained, and dtype has to be float32."""
    reuse_vision_features: Flag
    """Record with every decision the features that the vision encoder, which must be frozen, gives of the images; the
    update of rloo takes them in the place of images."""
    augmentation: Augmentation

    @model_validator(mode="after")
    def _consistent(self) -> OpenVlaOft:
        if (self.checkpoint is None) == (self.size is None):
            raise ValueError("needs either checkpoint or size; the other one is null")
        return self


class Pi0Weights(Section):
    """Weights of pi0 or pi0.5, as openpi writes them for PyTorch."""

    path: Name
    """A folder with safetensors."""
    norm_stats: Name
    """The file norm_stats.json of the dataset they were trained on: PATH/assets/DATASET/norm_stats.json."""
    tokenizer: Name
    """The file tokenizer.json of PaliGemma."""
    delta_actions: Flag
    """Whether its actions are relative to the first six numbers of the state, as those of openpi's pi0_libero."""


class Pi0(Section):
    """PaliGemma with an action expert that denoises the chunk of actions, with published weights."""

    family: Literal["pi0"]
    inputs: Inputs
    checkpoint: Pi0Weights
    """Published weights."""
    horizon: Count
    """Actions that are denoised; 50 in pi0, 10 in pi05_libero. The first of them are played (chunk)."""
    max_tokens: Count
    """The longest prompt; 48 in pi0, 200 in pi0.5."""
    chunk: Count
    denoising_steps: Count
    flow_sde: FlowSde | None
    flow_noise: FlowNoise | None
    train: Literal["expert", "language_model", "all"]
    """Which parts: the expert and its projections; Gemma and the projector of images as well; or SigLIP, too."""
    lora: Lora | None
    """Adapters in the parts that train names; null = their weights are trained."""
    reuse_vision_features: Flag
    """Record with every decision the features that the vision encoder, which must be frozen, gives of the images; the
    update of rloo takes them in the place of images."""
    augmentation: Augmentation

    @property
    def head(self) -> Literal["flow_sde", "flow_noise"]:
        return "flow_noise" if self.flow_sde is None else "flow_sde"

    @model_validator(mode="after")
    def _consistent(self) -> Pi0:
        _check_denoising(self)
        if self.chunk > self.horizon:
            raise ValueError(f"chunk ({self.chunk}) is above horizon ({self.horizon}): only what is denoised is played")
        return self


class PolicySettings(Section):
    """What the section of a family of another package has at least (docs/extending.md); it adds its own parameters."""

    family: Name
    inputs: Inputs
    chunk: Count
    head: Name
    """As in the families above where it is one of theirs: rlpd needs tanh_gaussian, and learn_std gaussian or l1."""


OurPolicy = GaussianMlp | Cnn | Vla | Flow | OpenVlaOft | Pi0
FAMILIES: tuple[str, ...] = tuple(get_args(each.model_fields["family"].annotation)[0] for each in get_args(OurPolicy))
_OUR_POLICY: TypeAdapter[OurPolicy] = TypeAdapter(Annotated[OurPolicy, Field(discriminator="family")])


def _policy(value: Any) -> OurPolicy | PolicySettings:
    """By the type of its family; those of other packages are looked up only where a file names one."""
    if isinstance(value, OurPolicy | PolicySettings):
        return value
    family = value.get("family") if isinstance(value, Mapping) else None
    if not isinstance(family, str) or family in FAMILIES:
        return _OUR_POLICY.validate_python(value)
    others = plugins.find(plugins.POLICY_SETTINGS, FAMILIES)
    if family not in others:
        raise PydanticCustomError(
            _UNKNOWN_FAMILY,
            "should be one of {families}, got '{family}'",
            {"families": ", ".join([*FAMILIES, *others]), "family": family},
        )
    settings = plugins.load(others[family])
    if not (isinstance(settings, type) and issubclass(settings, PolicySettings)):
        raise plugins.unfit(others[family], "a subclass of nightshift.config.PolicySettings")
    return settings.model_validate(value)


Policy = Annotated[SerializeAsAny[OurPolicy | PolicySettings], PlainValidator(_policy)]


class Sft(Section):
    """Behaviour cloning."""

    steps: Natural
    """0 hands on the weights of a checkpoint as they are."""
    batch_size: Count
    """Decisions of demos per gradient step."""
    learning_rate: Positive
    """After the warm-up; it falls linearly to zero."""
    warmup_steps: Natural
    """Steps in which the learning rate rises linearly from zero; a transformer needs some."""

    @model_validator(mode="after")
    def _consistent(self) -> Sft:
        if 0 < self.steps <= self.warmup_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}, so the learning rate never reaches learning_rate within "
                f"{self.steps} steps: raise steps or lower warmup_steps"
            )
        return self


class Clip(Section):
    """Bounds of PPO's clipped objective on the ratio of new to old probability: [1 - low, 1 + high]."""

    low: Annotated[float, Field(gt=0, lt=1, strict=True)]
    """The ratio is clipped at 1 - low."""
    high: Positive
    """The ratio is clipped at 1 + high."""
    dual: Annotated[float, Field(gt=1, allow_inf_nan=False, strict=True)] | None
    """Dual clip: where the advantage is negative, the loss is at most this many times its size; null = no bound."""
    log_ratio: Positive | None
    """Bound of the logarithm of the ratio, before it is exponentiated; null = only what avoids overflow."""


class Kl(Section):
    """The penalty on the KL to the reference policy, the one that reinforcement learning starts from."""

    coef: NonNegative
    """Of the penalty in the loss; 0 = none."""
    form: Literal["k1", "k2", "k3", "abs"]
    """The estimator of the KL."""
    target: Positive | None
    """Adapt the coefficient so that the KL stays near this; null keeps it constant."""
    horizon: Count
    """Episodes over which an adaptive coefficient reacts."""


class Critic(Section):
    """The value network of GAE; used where advantage_estimator is gae."""

    hidden: Annotated[tuple[Count, ...], Field(min_length=1)]
    """Widths of the hidden layers."""
    learning_rate: Positive
    """Of AdamW."""
    gamma: Annotated[float, Field(gt=0, le=1, strict=True)]
    """Discount per decision."""
    gae_lambda: Annotated[float, Field(ge=0, le=1, strict=True)]
    """0 relies on the critic's values alone, 1 on the outcome alone."""


class Optimizer(Section):
    learning_rate: Positive
    """Of AdamW."""
    weight_decay: NonNegative
    """Of AdamW."""
    warmup_steps: Natural
    """Gradient steps of linear warm-up."""
    schedule: Literal["constant", "cosine"]
    """After the warm-up; cosine falls to zero over all iterations."""
    max_grad_norm: Positive
    """Bound of the gradient's norm."""


class Sampling(Section):
    """Which groups an iteration learns from."""

    tasks_at_once: Natural
    """Tasks of one iteration; the next iteration takes the next ones in turn; 0 = all."""
    min_success_rate: Annotated[float, Field(ge=0, le=1, strict=True)]
    """A group below it is not learned from."""
    max_success_rate: Annotated[float, Field(ge=0, le=1, strict=True)]
    """A group above it is not learned from; both bounds are included."""
    waves: Count
    """Of groups per iteration: after the first, as many as are still missing."""
    oversample: Annotated[float, Field(ge=1, allow_inf_nan=False, strict=True)]
    """Ask for this many times the groups that are missing. Surplus groups are counted and dropped: at the next update
    they would be off-policy."""
    when_short: Literal["train", "skip"]
    """If all waves leave groups missing: train on what there is, or end the iteration without an update."""
    skip_solved: Natural
    """Pass over an init state that a whole group solved until it has come up this often again."""
    staleness: Literal[0, 1]
    """Updates between the policy that plays and the one that learns: 1 plays the next iteration during the update."""
    curriculum_floor: Annotated[float, Field(gt=0, le=1, strict=True)]
    """Groups of a task that is always or never solved, relative to one that is solved half the time: 1 plays all tasks
    alike. It must be high enough to notice when a solved task is forgotten."""

    @model_validator(mode="after")
    def _consistent(self) -> Sampling:
        if self.min_success_rate > self.max_success_rate:
            raise ValueError("min_success_rate is above max_success_rate: no group could be accepted")
        if self.oversample > 1 and (self.min_success_rate, self.max_success_rate) == (0, 1):
            raise ValueError(
                "oversample above 1 wastes episodes while min_success_rate and max_success_rate accept every group"
            )
        return self


class Validation(Section):
    """How a training stage chooses the policy that it hands on."""

    every: Count
    """Iterations (in rlpd: decisions) between two plays of the greedy policy on the validation states."""
    level: Annotated[float, Field(gt=0, lt=1, strict=True)]
    """The best trained policy is handed on if a paired one-sided sign test finds it better than the start at this
    level; otherwise the start is."""


class Rloo(Section):
    """Policy gradient on rollouts: RLOO, GRPO, REINFORCE++ or PPO."""

    iterations: Count
    """Rollouts and updates in turn."""
    groups: Count
    """Init states per iteration that are learned from, taken in turn from every task."""
    group_size: Annotated[int, Field(ge=2, strict=True)]
    """Episodes per init state; a leave-one-out baseline needs at least two."""
    sampling: Sampling
    validation: Validation
    temperature: Positive
    """Standard deviation of exploration in the first iteration, in standard deviations of the demos' actions."""
    temperature_end: Positive
    """In the last iteration; linear in between. Wide noise finds what works, and hides where the mean action fails:
    narrow noise at the end lets training see what the greedy policy does."""
    learn_std: Flag
    """Whether gradients change the standard deviation as well."""
    advantage_estimator: Literal["rloo", "rloo_batch", "grpo", "reinforce++", "gae"]
    """How episodes are compared: with the rest of their group (rloo, grpo), with the batch (rloo_batch, reinforce++),
    or with the value network (gae, which is PPO)."""
    ratio_level: Literal["token", "action", "chunk"]
    """What a probability ratio is taken of: one dimension of an action, an action, or a chunk of actions."""
    loss_aggregation: Literal["step", "episode"]
    """Whether every step weighs the same, or every episode."""
    clip: Clip
    old_log_probs: Literal["rollout", "recomputed"]
    """As the simulator's worker computed them, or recomputed by the learner before the update. On a GPU they are always
    recomputed unless staleness is 1: batches of other shapes round differently."""
    kl: Kl
    entropy_coef: NonNegative
    """Coefficient of the entropy bonus; needs learn_std."""
    bc_weight: NonNegative
    """Weight of the behaviour-cloning loss on the demos, beside the policy-gradient loss."""
    critic: Critic
    epochs: Count
    """Passes over an iteration's episodes."""
    minibatch_size: Count | None
    """Decisions per gradient step; the last one of an epoch has what is left. null = by num_minibatches."""
    num_minibatches: Count | None
    """Gradient steps per epoch, on equal parts of its decisions; null = by minibatch_size."""
    optimizer: Optimizer
    target_kl: Positive | None
    """An iteration's update ends early when the KL from its start exceeds this, measured on the whole batch after every
    gradient step; null never ends it, and measures once, at the end."""

    @model_validator(mode="after")
    def _consistent(self) -> Rloo:
        if self.kl.target is not None and not self.kl.coef:
            raise ValueError("kl.target has no effect while kl.coef is 0: give a coefficient to adapt")
        if (self.minibatch_size is None) == (self.num_minibatches is None):
            raise ValueError("set one of minibatch_size and num_minibatches to a number, and the other to null")
        self._check_accepted()
        return self

    def _check_accepted(self) -> None:
        """Without a critic a group teaches only if some of its episodes succeed and others fail."""
        low, high, size = self.sampling.min_success_rate, self.sampling.max_success_rate, self.group_size
        accepted = [solved for solved in range(size + 1) if low <= solved / size <= high]
        bounds = f"sampling.min_success_rate {low:g} and max_success_rate {high:g}"
        if not accepted:
            raise ValueError(f"no group of {size} episodes has a success rate within {bounds}: move them apart")
        teaching = range(1, size + (self.advantage_estimator == "gae"))
        if not set(teaching).intersection(accepted):
            alike, change = ("succeed", "lower the first") if accepted[0] else ("fail", "raise the second")
            raise ValueError(
                f"{bounds} accept only groups whose episodes all {alike}, of which nothing is learned: {change}"
            )


Rate = Annotated[float, Field(gt=0, le=1, strict=True)]

SIMULATOR = "simulator"
"""The reward of rlpd that needs no classifier."""
CLASSIFIER_NAME = re.compile("classifier-[0-9a-f]{12}")


def _known_reward(value: str) -> str:
    return value if CLASSIFIER_NAME.fullmatch(value) else _known(plugins.REWARDS, (SIMULATOR, "classifier-…"), value)


class CriticEnsemble(Section):
    """Q-functions of RLPD: each sees the observation and the actions of a decision."""

    num_qs: Count
    """Networks in the ensemble; the actor follows the mean of all."""
    num_min_qs: Count
    """Of these, drawn anew without replacement for every gradient step: the target is the minimum over them."""
    hidden: Sizes
    """Widths of a critic's hidden layers."""
    activation: Literal["tanh", "relu"]
    """Of the hidden layers."""
    layer_norm: Flag
    """Layer normalisation before every activation: it bounds the values of actions that no data has."""
    learning_rate: Positive
    """Of Adam."""
    tau: Rate
    """Share of the critics in the Polyak average that follows them, after every gradient step of theirs."""

    @model_validator(mode="after")
    def _consistent(self) -> CriticEnsemble:
        if self.num_min_qs > self.num_qs:
            raise ValueError(
                f"num_min_qs ({self.num_min_qs}) is above num_qs ({self.num_qs}): draw at most all critics"
            )
        return self


class RlpdActor(Section):
    start: Literal["clone", "scratch"]
    """The policy of the stage sft, or fresh weights. The image encoder of a clone is not trained."""
    learning_rate: Positive
    """Of Adam."""
    bc_weight: NonNegative
    """Weight of the behaviour-cloning loss on the demos of the batch; it falls linearly to zero over bc_steps."""
    bc_steps: Natural
    """Updates of the actor with a cloning loss."""
    ema_decay: Annotated[float, Field(ge=0, lt=1, strict=True)]
    """Of the average of the actor's weights, per update, that is validated and handed on; 0 = the newest weights."""

    @model_validator(mode="after")
    def _consistent(self) -> RlpdActor:
        if bool(self.bc_weight) != bool(self.bc_steps):
            raise ValueError("bc_weight and bc_steps need each other: set both, or both to 0")
        return self


class Entropy(Section):
    """The entropy that SAC adds to the reward, with a temperature that holds the policy's entropy at a target."""

    initial_temperature: Positive
    """Of the entropy, before the first update."""
    learning_rate: Positive
    """Of the temperature."""
    target: Annotated[float, Field(allow_inf_nan=False, strict=True)]
    """Entropy that the temperature aims at, per action dimension."""
    relative: Flag
    """Whether the target is added to the clone's own entropy, its mean over the demos."""
    backup: Flag
    """Whether the critics' targets contain the entropy of the next action."""


class Interventions(Section):
    """Who may take over while rlpd plays, and when (interventions/)."""

    source: Literal["none", "scripted", "keyboard", "gamepad", "spacemouse", "browser"]
    """Nobody, the scripted expert, or a person with this input device or at the web page of machine.page."""
    stall_steps: Count
    """Scripted: it takes over if the hand has moved less than stall_distance in so many control steps."""
    stall_distance: NonNegative
    """Metres."""
    stray_steps: Count
    """Scripted: it takes over if so many actions in a row were further than stray_distance from its own."""
    stray_distance: Positive
    """Euclidean distance of two actions."""
    hold_steps: Count
    """Scripted: control steps that it acts for."""
    release_seconds: Positive
    """A person with an input device: the policy acts again so long after the last input. Keys that are held repeat
    after 0.5 s."""
    takeover: Literal["bootstrap", "fail"]
    """What follows for the critics where somebody takes over: the value of the policy's next action, or nothing."""
    imitate: Imitate
    """Which actions of interventions the cloning loss imitates: none, those that the critics value more than the
    policy's own (a Q-filter, Nair et al. 2018), or all."""

    @property
    def is_on(self) -> bool:
        return self.source != "none"

    @property
    def is_by_person(self) -> bool:
        return self.source not in ("none", "scripted")


class Rlpd(Section):
    """Off-policy learning from demos and experience (RLPD, Ball et al. 2023; HIL-SERL, Luo et al. 2024)."""

    steps: Count
    """Decisions to play: environment steps where policy.chunk is 1."""
    episodes_at_once: Count
    """Episodes that one version of the policy plays; as many updates follow as they have decisions."""
    staleness: Natural
    """Rounds of episodes that actors may play ahead of the learner; 0 = they wait while it updates."""
    random_steps: Natural
    """Decisions at first whose actions are drawn uniformly."""
    training_starts: Count
    """Decisions before the first update, which are not made up for."""
    warmup_steps: Natural
    """Updates of critics and temperature on demos alone, before the first decision; the actor stays as it is."""
    utd_ratio: Count
    """Gradient steps of the critics per decision; actor and temperature make one."""
    batch_size: Count
    """Transitions per gradient step."""
    demo_share: Annotated[float, Field(ge=0, le=1, strict=True)] | Literal["pooled"]
    """Of every batch; the rest is experience. Pooled: demos and experience are one buffer, so the share of demos falls
    while experience comes in. Interventions are demos and experience, and so are drawn twice as often."""
    window: Natural
    """Newest episodes of experience to sample from; 0 = all."""
    discount: Rate
    """Per control step."""
    n_step: Count
    """Decisions whose rewards a target sums up before it bootstraps."""
    critics: CriticEnsemble
    actor: RlpdActor
    entropy: Entropy
    reward: Annotated[str, AfterValidator(_known_reward)]
    """What says that an episode succeeded: the simulator, the success classifier of this name, or a reward of another
    package."""
    interventions: Interventions
    validation: Validation

    @model_validator(mode="after")
    def _consistent(self) -> Rlpd:
        if self.warmup_steps and not self.demo_share:
            raise ValueError("warmup_steps needs demos: raise demo_share or set warmup_steps: 0")
        if self.actor.bc_weight and not self.demo_share:
            raise ValueError("actor.bc_weight needs demos: raise demo_share or set actor.bc_weight: 0.0")
        if self.interventions.imitate != "none" and not self.actor.bc_weight:
            raise ValueError("interventions.imitate needs actor.bc_weight: raise it or set interventions.imitate: none")
        if self.entropy.relative and self.actor.start == "scratch":
            raise ValueError("entropy.relative needs actor.start: clone: fresh weights have no entropy worth keeping")
        if self.steps < self.training_starts:
            raise ValueError(
                f"training_starts is {self.training_starts}, so no update comes within {self.steps} steps: raise steps "
                "or lower training_starts"
            )
        return self


class Classifier(Section):
    """The success classifier on camera images (`nightshift classifier`)."""

    sources: Annotated[Names, Field(min_length=1)]
    """Episodes to learn from: "demos", "rollouts" (nightshift classifier record), any other name is an import."""
    inputs: Inputs
    """Cameras, and the instruction where several tasks share the classifier."""
    ambiguous_steps: Natural
    """Control steps before success whose frames are neither successes nor failures: they are left out."""
    calibration_share: Share
    """Of the starts of a task: their episodes choose the threshold."""
    test_share: Share
    """Of the starts of a task: their episodes are for `nightshift classifier evaluate` alone."""
    precision: Annotated[float, Field(gt=0, lt=1, strict=True)]
    """The threshold is the lowest one whose precision on the calibration episodes is at least this, by the lower end of
    its 95 % interval."""
    channels: Sizes
    """Of the convolutions, each of which halves the image."""
    hidden: Count
    """Features of each camera, and width of the layer after them."""
    dropout: Annotated[float, Field(ge=0, lt=1, strict=True)]
    """Share of that layer that a training step leaves out."""
    max_words: Count
    """The longest instruction."""
    steps: Count
    """Gradient steps."""
    batch_size: Annotated[int, Field(ge=2, multiple_of=2, strict=True)]
    """Frames per gradient step: half of them successes."""
    learning_rate: Positive
    """Of Adam."""
    augmentation: Augmentation

    @model_validator(mode="after")
    def _consistent(self) -> Classifier:
        if self.calibration_share + self.test_share >= 1:
            raise ValueError("calibration_share and test_share leave nothing to train on: their sum must be below 1")
        return self


class Evaluate(Section):
    """The grid of held-out init states that every candidate plays."""

    init_states: CountOrAuto
    """Held-out init states per task, each counted once; auto takes the protocol's number."""
    temperature: NonNegative
    """0 is greedy: the policy's mean action. Above, actions are sampled as training would at that temperature."""
    films: Natural
    """Init states to film with every candidate; 0 = none."""


class Register(Section):
    """The registry, and the gate to become champion: docs/models.md."""

    model: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    """Name of the model in MLflow's registry."""
    level: Annotated[float, Field(gt=0, le=0.5, strict=True)]
    """A policy becomes champion if its one-sided exact p is at most this; at 0.5 one state more is enough."""
    min_success_rate: Annotated[float, Field(ge=0, le=1, strict=True)]
    """A champion solves at least this share of the evaluation's states, and at least one."""
    max_task_drop: Annotated[float, Field(ge=0, le=1, strict=True)]
    """How much lower than the champion's the success rate on any task may be; 1 = any."""
    max_perturbation_drop: Annotated[float, Field(ge=0, le=1, strict=True)] | None = None
    """How much lower than the champion's the success rate under any perturbation may be, by `nightshift robustness`
    (docs/robustness.md); not given = perturbations do not count."""
    weights: Literal["whole", "adapter", "merged"] = "whole"
    """What MLflow stores: the policy as it was trained; its adapter, with path and sha256 of the published checkpoint;
    or weights with the adapter merged into them. The last two need policy.lora."""


class Robustness(Section):
    """The grid of `nightshift robustness`: perturbations x strengths x tasks; in no cache key."""

    perturbations: Names
    """Which; empty = all that the suite can do and the policy can notice. `nightshift robustness --list` shows them."""
    strengths: Annotated[tuple[Annotated[float, Field(gt=0, le=5, strict=True)], ...], Field(min_length=1)]
    """The levels of each, as in LIBERO-Plus; unperturbed episodes are played besides. Some take whole numbers only."""
    init_states: Count
    """Held-out init states of every task in every cell."""
    films: Natural
    """Perturbations of which a typical failure is filmed, the worst first; 0 = none."""
    paraphrases: Name | None
    """A YAML file with sentences for every task, for language_instructions; null = those of Nightshift."""

    @model_validator(mode="after")
    def _ascending(self) -> Robustness:
        if sorted(set(self.strengths)) != list(self.strengths):
            raise ValueError("strengths should ascend, each once")
        return self


FORMATS = ("hdf5", "hil-serl", "lerobot", "rlds")
"""Of other projects, that can be imported; other packages add theirs."""


def _known_format(value: str) -> str:
    return _known(plugins.FORMATS, FORMATS, value)


class Nightly(Section):
    """What `nightshift nightly` does besides running the pipeline."""

    inbox: Name | None
    """A folder in which every file or folder is imported once, under its name; ~ is the home folder; null = none."""
    format: Annotated[str, AfterValidator(_known_format)]
    """Of what is put there."""
    task: Name | None = None
    """What it shows, where its files do not say: those of hil-serl never do."""
    pull: Flag
    """Get imports from DVC's remote: those that git names and this clone lacks, newer ones of other repositories."""
    commit: Flag
    """Commit dvc.lock and the .dvc files of the report and of imports: git knows the versions of every night."""


Event = Literal["failure", "promotion", "regression", "nothing_to_do"]


class Notify(Section):
    """What is told to people; where to is a secret, in the environment variable NIGHTSHIFT_NOTIFY."""

    events: Annotated[tuple[Event, ...], AfterValidator(_unique)]
    """Which outcomes of a run are told; empty = none."""


class Params(Section):
    seed: Annotated[int, Field(ge=0, lt=2**32, strict=True)]
    """Of every random number: the same seed gives the same weights."""
    algorithms: Algorithms
    """The training stages that run; empty evaluates the clone alone."""
    start: Start
    """The weights that cloning begins with: fresh ones, or those of the champion in the registry."""
    machine: Machine
    env: Env
    states: States
    collect: Collect
    dataset: Dataset
    policy: Policy
    sft: Sft
    rloo: Rloo
    rlpd: Rlpd
    classifier: Classifier
    evaluate: Evaluate
    robustness: Robustness
    register_: Register = Field(alias="register")
    nightly: Nightly
    notify: Notify

    @model_validator(mode="after")
    def _consistent(self) -> Params:
        if not self.sft.steps and not (isinstance(self.policy, OpenVlaOft | Pi0) and self.policy.checkpoint):
            raise ValueError("sft.steps is 0, and the policy has no checkpoint to start from: raise sft.steps")
        if self.dataset.sources == ("demos",) and self.collect.demos_per_task == 1 and self.dataset.validation_share:
            raise ValueError(
                "collect.demos_per_task is 1, and one demo of each task is held back for validation: raise it, or set "
                "dataset.validation_share: 0"
            )
        self._check_registered()
        if "rloo" in self.algorithms:
            self._check_rloo()
        if "rlpd" in self.algorithms:
            self._check_rlpd()
        return self

    def _check_registered(self) -> None:
        stored = self.register_.weights
        if stored == "whole":
            return
        if not (isinstance(self.policy, OpenVlaOft | Pi0) and self.policy.lora):
            raise ValueError(f"register.weights is {stored}, and policy has no adapter (lora): set weights: whole")
        if stored == "adapter" and self.policy.checkpoint is None:
            raise ValueError(
                "register.weights is adapter, and its base, policy.checkpoint, is null: set weights: whole"
            )
        if stored == "merged" and self.start != SCRATCH:
            raise ValueError(
                f"start is {self.start}, and register.weights merged leaves no adapter that could be trained on: set "
                "weights: whole or adapter"
            )

    def _check_rloo(self) -> None:
        head = self.policy.head
        if head == "flow_sde" and self.rloo.entropy_coef:
            raise ValueError("rloo.entropy_coef has no effect: the noise of flow_sde is not learned; set it to 0")
        if head in ("gaussian", "l1") and self.rloo.entropy_coef and not self.rloo.learn_std:
            raise ValueError(
                "rloo.entropy_coef has no effect while rloo.learn_std is false: a Gaussian's entropy depends on its std"
            )
        if self.rloo.learn_std and head not in ("gaussian", "l1", "flow_noise"):
            raise ValueError(f"rloo.learn_std has no effect while {self._acts_by}: set learn_std: false")

    def _check_rlpd(self) -> None:
        if self.policy.head != "tanh_gaussian":
            raise ValueError(f"rlpd needs policy.head: tanh_gaussian, but {self._acts_by}")
        if self.machine.placement == "apart":
            raise ValueError("rlpd learns in the process of its stage: set machine.placement: colocated")

    @property
    def _acts_by(self) -> str:
        """Flow policies have no parameter `head`."""
        if isinstance(self.policy, Flow | Pi0):
            return f"the policy is {self.policy.family} with {self.policy.head}"
        return f"policy.head is {self.policy.head}"

    def skips(self, stage: str) -> bool:
        """Whether this is a training stage that is not chosen, or `start` where training starts from scratch."""
        return (stage in ALGORITHMS and stage not in self.algorithms) or (stage == START and self.start == SCRATCH)

    def section(self, name: str) -> Any:
        """The section (or plain value) that params.yaml calls `name`. Example: section("register.model")"""
        first, *rest = name.split(".")
        return functools.reduce(getattr, rest, getattr(self, "register_" if first == "register" else first))


YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML has it: parsing dvc.lock in Python takes a tenth of a second, seven times as long."""


class _StrictLoader(YAML_LOADER):  # type: ignore[misc]
    """Refuses a key that occurs twice, of which YAML would silently take the last."""

    def __init__(self, text: str, name: str) -> None:
        stream = io.StringIO(text)
        stream.name = self.name = name  # where libyaml looks for the name in its messages
        super().__init__(stream)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise ConfigError(f"{self.name} has {key!r} as a key in line {line}", "write a name there, or quote it")
            if key in seen:
                raise ConfigError(
                    f"{self.name} has the key {key!r} twice, in lines {seen[key]} and {line}", "remove one of them"
                )
            seen[key] = line
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_CONFLICT = ("<<<<<<< ", ">>>>>>> ")


def check_conflict(path: Path, text: str, name: str) -> None:
    """ConfigError if git left a conflict in the text of this file; `name` is how git is told of it."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(_CONFLICT):
            raise ConfigError(
                f"{path} has an unresolved git conflict in line {number}",
                f"edit it, or take one side: git checkout --ours -- {name}",
            )


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; ConfigError if git left a conflict in it, a key is there twice, or it is no YAML."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", "run from the project's root") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder", "name a file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}", f"git checkout -- {path.name}") from None
    check_conflict(path, text, path.name)
    loader = _StrictLoader(text, str(path))
    try:
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:  # its own words are nine lines
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{path} is not valid YAML: {place}{error.problem}", "mend the line") from None
    except yaml.YAMLError as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {what}", "mend the line that it names") from None
    except ValueError as error:  # a date that does not exist
        raise ConfigError(f"{path} has a value that YAML cannot read: {error}", "quote it if it is text") from None
    finally:
        loader.dispose()


def load(path: Path) -> Params:
    """Read params.yaml; one ConfigError lists everything that is wrong with it."""
    return validate(read_yaml(path), path)


def validate(raw: Any, path: Path) -> Params:
    """The params that were read from a file; one ConfigError lists everything that is wrong with them."""
    try:
        return Params.model_validate(raw if isinstance(raw, dict) else {})
    except ValidationError as error:
        problems = "\n".join(f"  - {_where(e)}: {_what(e)}" for e in error.errors())
        count = error.error_count()
        noun = "problem" if count == 1 else "problems"
        raise ConfigError(f"{path.name} has {count} {noun}:\n{problems}", f"edit {path} and run again") from None


def parameter_names(params: Params) -> list[str]:
    """Of all that params.yaml may set, by dotted name, also where it does not; of the policy, what its family has."""
    return list(_names_in(Params, params))


def _names_in(kind: type[Section], given: Section | None) -> Iterator[str]:
    for attribute, field in kind.model_fields.items():
        name, value = field.alias or attribute, getattr(given, attribute, None)
        yield name
        if isinstance(value, Section):
            inner = _names_in(type(value), value)
        elif isinstance(value, Mapping):
            inner = iter(value)
        else:
            inner = (each for section in _sections_in(field.annotation) for each in _names_in(section, None))
        yield from (f"{name}.{each}" for each in inner)


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for each in get_args(annotation):
        yield from _sections_in(each)


_UNKNOWN_FAMILY = "unknown_family"
_WRONG_FAMILY = (_UNKNOWN_FAMILY, "union_tag_not_found", "union_tag_invalid")


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, section by section, as read from YAML. A policy of another family replaces the whole
    section."""
    result = dict(base)
    for name, value in changes.items():
        known = result.get(name)
        if isinstance(known, Mapping) and isinstance(value, Mapping) and not _is_other_family(known, value):
            result[name] = merged(known, value)
        else:
            result[name] = value
    return result


def _is_other_family(section: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    return "family" in changes and changes["family"] != section.get("family")


def _where(error: Any) -> str:
    location = error["loc"]
    if error["type"] in _WRONG_FAMILY:
        location += ("family",)
    elif location[:1] == ("policy",) and location[1:2] and location[1] in FAMILIES:
        location = location[:1] + location[2:]  # pydantic puts the family in between
    return ".".join(str(part) for part in location) or "two sections do not fit"


def _what(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return f"unknown key (value {error['input']!r})"
    if error["type"] in ("missing", "union_tag_not_found"):
        return "missing"
    if error["type"] == _UNKNOWN_FAMILY:
        return str(error["msg"])
    if error["type"] == "union_tag_invalid":  # no name at all, such as null
        return f"should be one of {', '.join(FAMILIES)}, got {error['ctx']['tag']}"
    if not error["loc"]:
        return str(error["ctx"]["error"])
    message = (error["msg"][0].lower() + error["msg"][1:]).removeprefix("value error, ")
    return f"{message}{_got(error, message)}"


def _got(error: Any, message: str) -> str:
    """The value; nothing where the message names several fields of a section."""
    value = error["input"]
    if error["type"] == "value_error" and isinstance(value, Mapping):
        return ""
    is_exponent = isinstance(value, str) and "number" in message and _EXPONENT.fullmatch(value)
    return f", got {value!r}{f' (YAML reads that as text: write {_as_yaml(value)})' if is_exponent else ''}"


_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def _as_yaml(number: str) -> str:
    """YAML 1.1 takes a number with an exponent for one only if it has a point, and the exponent a sign."""
    mantissa, exponent = number.lower().split("e")
    return f"{mantissa if '.' in mantissa else f'{mantissa}.0'}e{exponent if exponent[0] in '+-' else f'+{exponent}'}"
