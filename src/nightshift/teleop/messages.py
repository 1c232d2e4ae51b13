"""What the page may say. Anything else is refused before it reaches the robot; nothing here names a file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from nightshift.errors import DataError

LARGEST = 4096
"""Bytes of a message."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Axis = Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
Gripper = Literal["open", "closed"]
Who = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""The free name of a person."""


class Hello(_Message):
    """The first message of a connection."""

    type: Literal["hello"]
    token: Annotated[str, Field(max_length=1024)] = ""


class Pilot(_Message):
    """Ask for the controls."""

    type: Literal["pilot"]
    who: Who


class Release(_Message):
    """Give the controls back."""

    type: Literal["release"]


class Drive(_Message):
    """How the hand shall move from now on; repeated as long as it shall, because an old one stops the robot."""

    type: Literal["drive"]
    seq: Annotated[int, Field(ge=0, lt=2**53)]
    """Counts the messages of a page; the state names the last one that reached the simulator."""
    axes: Annotated[tuple[Axis, ...], BeforeValidator(lambda axes: tuple(axes) if isinstance(axes, list) else axes)]
    """Of the action but its last number: translation x, y, z and rotation about x, y, z."""
    gripper: Gripper
    speed: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class Choose(_Message):
    """Reset to an init state of a task; None takes the one after the last."""

    type: Literal["reset"]
    task: Annotated[str, Field(max_length=200)]
    init_state: Annotated[int, Field(ge=0, lt=2**31)] | None


class Start(_Message):
    """Begin an episode; after one that ended, from the next init state."""

    type: Literal["start"]


class Pause(_Message):
    type: Literal["pause"]


class Resume(_Message):
    type: Literal["resume"]


class Mark(_Message):
    """End the episode as a success or a failure."""

    type: Literal["mark"]
    success: bool


class Undo(_Message):
    """Remove the last episode that was saved."""

    type: Literal["undo"]


class TakeOver(_Message):
    type: Literal["take_over"]


class HandBack(_Message):
    type: Literal["hand_back"]


class Answer(_Message):
    """To what the run asks the person beside the robot."""

    type: Literal["answer"]
    id: Annotated[str, Field(max_length=64)]
    """Of the question: no answer goes to another one than was read."""
    yes: bool


class Seen(_Message):
    """A picture has arrived, so another may be sent."""

    type: Literal["seen"]


Order = Choose | Start | Pause | Resume | Mark | Undo | TakeOver | HandBack
"""What only the pilot may ask for, besides `Drive` and `Answer`."""
Message = Annotated[Hello | Pilot | Release | Drive | Order | Answer | Seen, Field(discriminator="type")]
_MESSAGE: TypeAdapter[Any] = TypeAdapter(Message)


def parse(text: str) -> Any:
    """One of the messages above; DataError says what is wrong with the text."""
    if len(text) > LARGEST:
        raise DataError(f"a message of {len(text)} characters; {LARGEST} are the most")
    try:
        return _MESSAGE.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "message"
        raise DataError(f"{where}: {first['msg']}") from None
