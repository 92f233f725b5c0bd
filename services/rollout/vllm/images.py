"""Gives images to vLLM together with token ids: an ASGI middleware of vLLM's server.

vLLM's route for token ids takes images in the form that its models take, which only vLLM's own
classes can write. This middleware adds the route `/inference/v1/generate-with-images`. Its body is
that of `/inference/v1/generate` with one more key:

    images: [{digest, width, height, rgb}], in the order of their placeholders

rgb: base64 of height x width x 3 bytes. Pixels are computed by the model's image processor with
Pillow, as in `services.model.vision`: the trainer has the same pixels and token ids.

This file is copied alone into vLLM's environment (`services.rollout.vllm.server`), so it must
import nothing but the standard library and what vLLM depends on.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import cache
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

ROUTE = "/inference/v1/generate-with-images"
TOKEN_ROUTE = "/inference/v1/generate"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class TakesImages:
    """Rewrites requests for `ROUTE` to requests for vLLM's own `TOKEN_ROUTE`."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != ROUTE:
            await self._app(scope, receive, send)
            return
        body = json.loads(await _read_body(receive))
        try:
            body["features"] = await asyncio.to_thread(
                _features, tuple(body["token_ids"]), body.pop("images")
            )
        except ValueError as error:
            await _refuse(send, str(error))
            return
        data = json.dumps(body).encode()
        headers = [
            (name, str(len(data)).encode() if name == b"content-length" else value)
            for name, value in scope["headers"]
        ]
        taken = False

        async def replay() -> Message:
            nonlocal taken
            if taken:
                return await receive()  # vLLM waits for the disconnection here
            taken = True
            return {"type": "http.request", "body": data, "more_body": False}

        rewritten = {**scope, "path": TOKEN_ROUTE, "raw_path": TOKEN_ROUTE.encode()}
        await self._app({**rewritten, "headers": headers}, replay, send)


async def _read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _refuse(send: Send, reason: str) -> None:
    body = json.dumps({"error": {"message": reason}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _features(token_ids: Sequence[int], images: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns vLLM's `MultiModalFeatures` of a prompt, as JSON.

    Raises `ValueError` if the placeholders are not those of the images.
    """
    config, processor = _model()
    token = int(config["image_token_id"])
    serialization: Any = import_module("vllm.entrypoints.scale_out.token_in_token_out.mm_serde")
    items, lengths = [], []
    for image in images:
        item, length = _item(config, processor, image)
        items.append(item)
        lengths.append(length)
    return {
        "mm_hashes": {"image": [image["digest"] for image in images]},
        "mm_placeholders": {"image": _placeholders(token_ids, token, lengths)},
        "kwargs_data": {"image": [serialization.encode_mm_kwargs_item(item) for item in items]},
    }


def _item(config: dict[str, Any], processor: Any, image: dict[str, Any]) -> tuple[Any, int]:
    """Returns an image as vLLM's class of the model takes it, and its number of placeholders."""
    pillow: Any = import_module("PIL.Image")
    inputs: Any = import_module("vllm.multimodal.inputs")
    torch: Any = import_module("torch")
    rgb = base64.b64decode(image["rgb"])
    picture = pillow.frombytes("RGB", (image["width"], image["height"]), rgb)
    field = inputs.MultiModalFieldConfig
    if config["model_type"] == "internvl":
        prepared = processor(images=[picture], return_tensors="pt", crop_to_patches=True)
        tiles = torch.tensor([len(prepared["pixel_values"])])
        length = len(prepared["pixel_values"]) * int(config["image_seq_length"])
        values = {
            "pixel_values": prepared["pixel_values"],
            "image_num_patches": tiles,
            "image_token_id": torch.tensor(config["image_token_id"]),
        }
        fields = {
            "pixel_values": field.flat_from_sizes("image", tiles),
            "image_num_patches": field.batched("image", keep_on_cpu=True),
            "image_token_id": field.shared("image", 1, keep_on_cpu=True),
        }
    else:
        values = processor(images=[picture], return_tensors="pt")
        length = int(values["image_grid_thw"].prod()) // int(processor.merge_size) ** 2
        fields = {
            "pixel_values": field.flat_from_sizes("image", values["image_grid_thw"].prod(-1)),
            "image_grid_thw": field.batched("image", keep_on_cpu=True),
        }
    (item,) = inputs.MultiModalKwargsItems.from_hf_inputs(values, fields)["image"]
    return item, length


def _placeholders(
    token_ids: Sequence[int], token: int, lengths: Sequence[int]
) -> list[dict[str, int]]:
    """Returns where the placeholders of each image are.

    Those of several images may follow one another. Placeholders after those of the images were
    sampled and belong to no image.
    """
    runs, position = [], 0
    for is_placeholder, members in groupby(token_ids, lambda found: found == token):
        length = len(list(members))
        if is_placeholder:
            runs.append((position, length))
        position += length
    places: list[dict[str, int]] = []
    for length in lengths:
        offset, left = runs.pop(0) if runs else (0, 0)
        if left < length:
            found = [run for _, run in runs]
            raise ValueError(
                f"the prompt has {[left, *found]} placeholders for images of {list(lengths)} "
                "patches; use the processor that belongs to the model"
            )
        places.append({"offset": offset, "length": length})
        if left > length:
            runs.insert(0, (offset + length, left - length))
    return places


@cache
def _model() -> tuple[dict[str, Any], Any]:
    """Returns config.json and the image processor of the model that vLLM serves."""
    transformers: Any = import_module("transformers")
    directory = Path(sys.argv[sys.argv.index("--model") + 1])
    processor = transformers.AutoImageProcessor.from_pretrained(
        directory, backend="pil", trust_remote_code=False
    )
    return json.loads((directory / "config.json").read_text()), processor
