# SPDX-License-Identifier: Apache-2.0
"""Still pictures of a recorded episode, small enough to stand inside a page."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import av
from PIL import Image

HEIGHT = 168


def film_strip(video: Path, num_frames: int = 3) -> list[str]:
    """Frames from the first to the last of a video, evenly spaced, as ``data:`` addresses of JPEG images.

    Raises:
        ValueError: the file holds no frame.
    """
    with av.open(str(video)) as container:
        frames = [frame.to_image() for frame in container.decode(video=0)]
    if not frames:
        raise ValueError(f"{video} holds no frame; record the episode again.")
    places = [round(index * (len(frames) - 1) / max(1, num_frames - 1)) for index in range(num_frames)]
    return [_data_address(frames[place]) for place in dict.fromkeys(places)]


def _data_address(image: Image.Image) -> str:
    width = round(image.width * HEIGHT / image.height)
    resampling = Image.Resampling.NEAREST if image.height < HEIGHT else Image.Resampling.LANCZOS
    buffer = io.BytesIO()
    image.resize((width, HEIGHT), resampling).save(buffer, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
