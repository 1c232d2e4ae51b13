"""What travels between a client and a robot server: JSON without NaN, in which every float keeps its bits.

Python writes a float with as many digits as it takes to read the same float again, so JSON is exact. Camera images are
raw RGB bytes in base64. docs/robot_protocol.md has the whole protocol.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NoReturn, cast, get_args

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import Flip
from nightshift.envs.robot.poses import Vector
from nightshift.types import Body, Boxes, Joint, Scene

PROTOCOL = 2
"""Version of the protocol. A server of another version is refused."""

Capability = Literal["action", "observations", "success", "init_states", "scene", "move_gripper", "update_param"]
"""Extensions that a server announces; docs/robot_protocol.md says what each means."""
CAPABILITIES: tuple[str, ...] = get_args(Capability)
EXTENSIONS: Mapping[str, Capability] = {
    "move_gripper": "move_gripper",
    "update_param": "update_param",
    "reset": "init_states",
    "scene": "scene",
}
"""Endpoints that only a server with the capability has."""

GRIPPER_RANGE = 255
"""`gripper_pos` of /move_gripper when the gripper is open; 0 is closed."""

FLIPS: tuple[str, ...] = get_args(Flip)

Mode = Literal["ready", "held", "stopped"]
"""ready: commands are executed. held: no command came for too long, so the arm keeps its pose. stopped: a limit was
exceeded, or someone said so."""

POSE, VELOCITY, FORCE, JOINTS = 7, 6, 3, 7
STATE_SHAPES = {"pose": POSE, "vel": VELOCITY, "force": FORCE, "torque": FORCE, "q": JOINTS, "dq": JOINTS}
"""The vectors of a state under the names of HIL-SERL's Franka server. pose: x, y, z and a quaternion x, y, z, w."""


class BadMessage(ValueError):
    """A message that does not follow the protocol; the text says how."""


@dataclass(frozen=True)
class Refusal(Exception):
    """A request that a server does not carry out."""

    code: str
    what: str

    @property
    def status(self) -> int:
        return REFUSALS[self.code]

    def __str__(self) -> str:
        return f"{self.code}: {self.what}"


REFUSALS = {
    "bad_request": 400,
    "not_finite": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "no_session": 403,
    "unknown": 404,
    "busy": 409,
    "old_seq": 409,
    "seq_conflict": 409,
    "stale": 409,
    "too_long": 413,
    "outside_limits": 422,
    "held": 423,
    "stopped": 423,
    "latched": 423,
    "failed": 500,
}
"""Codes of refusals and their HTTP status."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What no command may ask for and no state may show. Distances in metres, angles in radians, forces in newtons."""

    box_low: tuple[float, float, float]
    box_high: tuple[float, float, float]
    """The safety box: where the hand's position may be sent."""
    max_turn: float
    """Angle between a target's orientation and that after the reset."""
    linear_speed: float
    angular_speed: float
    """Of the way from the measured pose to a target, in one control period; and of the measured velocity."""
    force: float
    torque: float
    """Measured at the hand: above them the robot is stopped."""


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """One task that the server offers."""

    name: str
    language: str
    index: int
    suite_size: int
    init_states: Mapping[str, int]
    """How many numbered starts there are, by "train" and "eval"."""
    digest: Mapping[str, str]
    """Of these starts: other starts under the same numbers have another one."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a server is: everything that a policy or a result depends on, and nothing that changes while it runs."""

    protocol: int
    name: str
    capabilities: tuple[str, ...]
    realtime: bool
    """True: time goes on between commands, and the client keeps the control rate. False: a simulator, which makes one
    control step per pose command."""
    control_hz: float
    watchdog_s: float
    """Without a command for this long the server holds the arm, and the session may be taken over."""
    command_age_s: float
    """A pose command is refused if the state it was decided on is older."""
    action_size: int
    action_scale: tuple[float, float] | None
    """With "action": metres and radians that an action of 1 stands for. None: the client's own numbers are used."""
    tasks: tuple[TaskInfo, ...]
    observations: Mapping[str, tuple[int, ...]]
    """Shapes of float32 vectors that the server computes itself, beside the state; needs "observations"."""
    cameras: Mapping[str, tuple[int, int, int]]
    limits: Limits
    compliance: tuple[str, ...] = ()
    """Names that /update_param takes."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the software behind the server: results of other versions do not compare."""
    flips: Mapping[str, Flip] = field(default_factory=dict)
    """By camera, where people should see its image another way round than policies do."""

    @property
    def digest(self) -> str:
        """What env.robot.description names: another robot, task or limit has another digest."""
        content = asdict(self)
        del content["flips"]  # nothing depends on what people see
        return f"robot-{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]}"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A camera image [H, W, 3] and when it was taken, by the server's clock."""

    time: float
    pixels: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class RobotState:
    """One measurement of the robot."""

    time: float
    """Seconds of the server's monotonic clock when it was measured."""
    mode: Mode
    pose: Vector  # [7]
    vel: Vector  # [6]
    force: Vector  # [3]
    torque: Vector  # [3]
    q: Vector  # [7]
    dq: Vector  # [7]
    gripper_pos: float  # 0 closed, 1 open
    success: bool = False
    unstable: bool = False
    """A simulator's physics broke down: the actions' fault, and the end of the episode."""
    observations: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    images: Mapping[str, Picture] = field(default_factory=dict)


def dumps(content: Mapping[str, Any]) -> bytes:
    """BadMessage if a number is not finite."""
    try:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:
        raise BadMessage(f"a number is not finite: {error}") from error


def loads(body: bytes) -> dict[str, Any]:
    """BadMessage if it is no JSON object, or a number in it is not finite."""
    try:
        content = json.loads(body, parse_constant=_refuse_constant)
    except BadMessage:
        raise
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"the body is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadMessage("the body is no JSON object")
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise BadMessage(f"a number is not finite: {name}")


def vector(content: Mapping[str, Any], name: str, size: int) -> Vector:
    """`size` finite numbers under `name`."""
    values = content.get(name)
    if not isinstance(values, list) or len(values) != size or not all(map(is_number, values)):
        raise BadMessage(f"{name} should be {size} numbers, and is {_shown(values)}")
    if not all(map(is_finite, values)):
        raise BadMessage(f"a number is not finite: {name} is {_shown(values)}")
    return np.array(values, np.float64)


def number(content: Mapping[str, Any], name: str) -> float:
    value: Any = content.get(name)
    if not is_number(value):
        raise BadMessage(f"{name} should be a number, and is {_shown(value)}")
    if not is_finite(value):
        raise BadMessage(f"a number is not finite: {name} is {_shown(value)}")
    return float(value)


def text(content: Mapping[str, Any], name: str) -> str:
    value = content.get(name)
    if not isinstance(value, str):
        raise BadMessage(f"{name} should be a text, and is {_shown(value)}")
    return value


def whole(content: Mapping[str, Any], name: str) -> int:
    value = content.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadMessage(f"{name} should be a whole number, and is {_shown(value)}")
    return value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: float) -> bool:
    """1e999 is JSON, and infinite as a double; so is a whole number of 400 digits."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"  # noqa: PLR2004 - a line of a message


def description_of(content: Mapping[str, Any]) -> Description:
    """BadMessage if something is missing or has another type."""
    if content.get("protocol") != PROTOCOL:
        raise BadMessage(f"protocol should be {PROTOCOL}, and is {_shown(content.get('protocol'))}")
    try:
        limits = content["limits"]
        described = Description(
            protocol=PROTOCOL,
            name=text(content, "name"),
            capabilities=tuple(map(str, content["capabilities"])),
            realtime=_flag(content, "realtime"),
            control_hz=number(content, "control_hz"),
            watchdog_s=number(content, "watchdog_s"),
            command_age_s=number(content, "command_age_s"),
            action_size=whole(content, "action_size"),
            action_scale=_scale_of(content),
            tasks=tuple(_task_of(task) for task in content["tasks"]),
            observations={str(name): tuple(shape) for name, shape in content["observations"].items()},
            cameras={str(name): tuple(shape) for name, shape in content["cameras"].items()},
            limits=limits_of(limits),
            compliance=tuple(map(str, content.get("compliance", ()))),
            versions={str(name): str(version) for name, version in content.get("versions", {}).items()},
            flips={str(name): cast(Flip, str(flip)) for name, flip in content.get("flips", {}).items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise BadMessage(f"the description lacks something or has another type: {error!r}") from error
    _check_description(described)
    return described


def _check_description(described: Description) -> None:
    unknown = sorted(set(described.capabilities) - set(CAPABILITIES))
    if unknown:
        raise BadMessage(f"capabilities has {', '.join(unknown)}, and there are {', '.join(CAPABILITIES)}")
    if not described.tasks:
        raise BadMessage("tasks is empty")
    if min(described.control_hz, described.watchdog_s, described.command_age_s) <= 0:
        raise BadMessage("control_hz, watchdog_s and command_age_s should be above 0")
    if ("action" in described.capabilities) != (described.action_scale is not None):
        raise BadMessage("action_scale belongs to the capability action: give both or none")
    if described.observations and "observations" not in described.capabilities:
        raise BadMessage("observations are described, and the capability observations is not announced")
    if ("update_param" in described.capabilities) != bool(described.compliance):
        raise BadMessage("compliance belongs to the capability update_param: give both or none")
    if not set(described.flips) <= set(described.cameras) or not set(described.flips.values()) <= set(FLIPS):
        raise BadMessage(f"flips should have one of {', '.join(FLIPS)} by camera, and is {_shown(described.flips)}")


def _flag(content: Mapping[str, Any], name: str) -> bool:
    value = content.get(name, False)
    if not isinstance(value, bool):
        raise BadMessage(f"{name} should be true or false, and is {_shown(value)}")
    return value


def _scale_of(content: Mapping[str, Any]) -> tuple[float, float] | None:
    if content.get("action_scale") is None:
        return None
    position, rotation = vector(content, "action_scale", 2).tolist()
    return position, rotation


def _task_of(content: Mapping[str, Any]) -> TaskInfo:
    states, digest = content["init_states"], content["digest"]
    return TaskInfo(
        name=text(content, "name"),
        language=text(content, "language"),
        index=whole(content, "index"),
        suite_size=whole(content, "suite_size"),
        init_states={split: whole(states, split) for split in ("train", "eval")},
        digest={split: text(digest, split) for split in ("train", "eval")},
    )


def limits_of(content: Mapping[str, Any]) -> Limits:
    low, high = (vector(content, name, 3) for name in ("box_low", "box_high"))
    names = ("max_turn", "linear_speed", "angular_speed", "force", "torque")
    numbers = {name: number(content, name) for name in names}
    if (low >= high).any() or min(numbers.values()) <= 0:
        raise BadMessage("limits should have box_low below box_high, and numbers above 0")
    return Limits(box_low=tuple(low.tolist()), box_high=tuple(high.tolist()), **numbers)


def state_content(state: RobotState) -> dict[str, Any]:
    """`state` as it is sent."""
    vectors = {name: getattr(state, name).tolist() for name in STATE_SHAPES}
    return {
        "time": state.time,
        "mode": state.mode,
        **vectors,
        "gripper_pos": state.gripper_pos,
        "success": state.success,
        "unstable": state.unstable,
        "observations": {name: values.tolist() for name, values in state.observations.items()},
        "images": {name: _picture_content(picture) for name, picture in state.images.items()},
    }


def state_of(content: Mapping[str, Any], described: Description, cameras: Sequence[str]) -> RobotState:
    """The state in a reply, with images of `cameras`; BadMessage if anything is missing or not finite."""
    mode: Any = content.get("mode")
    if mode not in get_args(Mode):
        raise BadMessage(f"mode should be one of {', '.join(get_args(Mode))}, and is {_shown(mode)}")
    vectors = {name: vector(content, name, size) for name, size in STATE_SHAPES.items()}
    return RobotState(
        time=number(content, "time"),
        mode=mode,
        **vectors,
        gripper_pos=number(content, "gripper_pos"),
        success=_flag(content, "success"),
        unstable=_flag(content, "unstable"),
        observations=_observations_of(content.get("observations", {}), described),
        images=_pictures_of(content.get("images", {}), described, cameras),
    )


def _observations_of(content: Any, described: Description) -> dict[str, NDArray[np.float32]]:
    if not isinstance(content, dict):
        raise BadMessage("observations should be an object")
    found = {}
    for name, shape in described.observations.items():
        values = np.array(vector(content, name, math.prod(shape)), np.float32)
        found[name] = values.reshape(shape)
    return found


def _pictures_of(content: Any, described: Description, cameras: Sequence[str]) -> dict[str, Picture]:
    if not isinstance(content, dict) or not all(isinstance(content.get(name), dict) for name in cameras):
        raise BadMessage(f"images should be an object with {', '.join(cameras)}")
    return {name: _picture_of(content[name], name, described.cameras[name]) for name in cameras}


def _picture_content(picture: Picture) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(picture.pixels).tobytes()).decode()
    return {"time": picture.time, "shape": list(picture.pixels.shape), "data": data}


def _picture_of(content: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Picture:
    if content.get("shape") != list(shape):
        raise BadMessage(f"the image of {name} should be {list(shape)}, and is {_shown(content.get('shape'))}")
    try:
        data = base64.b64decode(text(content, "data"), validate=True)
    except binascii.Error as error:
        raise BadMessage(f"the image of {name} is no base64: {error}") from error
    if len(data) != math.prod(shape):
        raise BadMessage(f"the image of {name} should have {math.prod(shape)} bytes, and has {len(data)}")
    return Picture(time=number(content, "time"), pixels=np.frombuffer(data, np.uint8).reshape(shape).copy())


def scene_content(scene: Scene) -> dict[str, Any]:
    """Privileged state as it is sent."""
    return {
        "gripper_position": scene.gripper_position.tolist(),
        "gripper_rotation": scene.gripper_rotation.tolist(),
        "gripper_opening": scene.gripper_opening,
        "bodies": {name: _body_content(body) for name, body in scene.bodies.items()},
        "joints": {name: _joint_content(joint) for name, joint in scene.joints.items()},
        "goal": [list(predicate) for predicate in scene.goal],
        "robot_position": None if scene.robot_position is None else scene.robot_position.tolist(),
    }


def scene_of(content: Mapping[str, Any]) -> Scene:
    try:
        base = content["robot_position"]
        return Scene(
            gripper_position=np.array(content["gripper_position"], np.float64),
            gripper_rotation=np.array(content["gripper_rotation"], np.float64),
            gripper_opening=number(content, "gripper_opening"),
            bodies={name: _body_of(body) for name, body in content["bodies"].items()},
            joints={name: _joint_of(joint) for name, joint in content["joints"].items()},
            goal=tuple(tuple(predicate) for predicate in content["goal"]),
            robot_position=None if base is None else np.array(base, np.float64),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadMessage(f"the scene lacks something or has another type: {error!r}") from error


def _body_content(body: Body) -> dict[str, Any]:
    return {
        "position": body.position.tolist(),
        "rotation": body.rotation.tolist(),
        "half_size": body.half_size.tolist(),
        "boxes": None if body.boxes is None else _boxes_content(body.boxes),
    }


def _boxes_content(boxes: Boxes) -> dict[str, Any]:
    return {name: values.tolist() for name, values in vars(boxes).items()}


def _boxes_of(content: Mapping[str, Any]) -> Boxes:
    count = len(content["centres"])
    return Boxes(
        centres=np.array(content["centres"], np.float64).reshape(count, 3),
        axes=np.array(content["axes"], np.float64).reshape(count, 3, 3),
        half_sizes=np.array(content["half_sizes"], np.float64).reshape(count, 3),
    )


def _joint_content(joint: Joint) -> dict[str, Any]:
    """JSON has no infinity: a predicate that holds up to one has null there."""
    return {
        "kind": joint.kind,
        "position": joint.position,
        "limits": list(joint.limits),
        "axis": joint.axis.tolist(),
        "anchor": joint.anchor.tolist(),
        "link": _boxes_content(joint.link),
        "holds": {name: [_finite(bound) for bound in bounds] for name, bounds in joint.holds.items()},
    }


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None


def _joint_of(content: Mapping[str, Any]) -> Joint:
    if content["kind"] not in ("slide", "hinge"):
        raise ValueError(f"a joint is a slide or a hinge, not {_shown(content['kind'])}")
    low, high = content["limits"]
    holds = {
        name: (-math.inf if first is None else float(first), math.inf if last is None else float(last))
        for name, (first, last) in content["holds"].items()
    }
    return Joint(
        kind=content["kind"],
        position=number(content, "position"),
        limits=(float(low), float(high)),
        axis=np.array(content["axis"], np.float64),
        anchor=np.array(content["anchor"], np.float64),
        link=_boxes_of(content["link"]),
        holds=holds,
    )


def _body_of(content: Mapping[str, Any]) -> Body:
    shape = content["boxes"]
    boxes = None if shape is None else _boxes_of(shape)
    position, rotation, half_size = (
        np.array(content[name], np.float64) for name in ("position", "rotation", "half_size")
    )
    return Body(position=position, rotation=rotation, half_size=half_size, boxes=boxes)
