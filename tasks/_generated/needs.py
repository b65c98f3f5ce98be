"""Spoken needs that the shapes of generated scenes fulfil."""

from typing import Any

from tasks._generated.scenes import Scene, describe, target_shape


def demand_of(colour: str) -> str:
    """The need that every shape of the colour fulfils."""
    return f"Locate: a {colour} shape"


def scene_row(scene: Scene) -> dict[str, Any]:
    """A row of the task `demand` for a scene: a need for the target's colour and all shapes that fulfil it.

    The shape that the scene's expression means comes first.
    """
    target = target_shape(scene)
    ordered = [target, *(shape for shape in scene.shapes if shape is not target)]
    objects = [
        {"label": shape.colour, "bbox_xyxy": list(shape.box_xyxy), "fulfils": shape.colour == target.colour}
        for shape in ordered
    ]
    thought = describe(target, scene.image.size)
    return {"id": scene.id, "need": demand_of(target.colour), "objects": objects, "thought": thought}
