"""Pictures, sounds and files in blocks of kinds that nobody knows here: found by what they carry, not by what they are called.

A block of an unknown kind is shown to the policy as the text of its JSON, so what is encoded in it must be seen first: a
picture in base64 is a million characters of nothing. What is only named (by an address, by an id) is text and stays, and so
does what is encrypted, as vendors send it along with search results.

Invariant: whatever is said to be base64 and looks like it, stands or lies under a media type of pictures, sound or video, is a
data: URL that is encoded, or begins as an encoded picture does, at any depth, is unreadable; all else is readable. A word
alone says nothing: `base64` may be a dependency, `blob` an object of git, `encoding` a setting, and a link names what a
listing of files names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_MEDIA = ("image/", "audio/", "video/")
_MEDIA_KEYS = ("media_type", "mediaType", "mime_type", "mimeType", "content_type", "contentType")
_LISTED_KEYS = ("content_type", "contentType")
"""Words of HTTP, in which files are listed: with an address beside them they are no picture yet."""
_CARRIES = ("data", "source", "content", "blob", "file", "file_id")
_NAMES = ("url", "uri")
_TEXTUAL = re.compile(r"text/|[^;]*[/+](?:json|xml|yaml|x-yaml|toml|javascript|x-sh)\b", re.IGNORECASE)
"""Media types of what is text although its bytes may be called data."""
_DATA_URL = re.compile(r"data:(?:(?:image|audio|video)/|[^,]{0,200};base64,)", re.IGNORECASE)
_ENCODED_KEYS = ("b64_json", "base64", "blob")
"""What lies in them is base64: of an image that was made, of anything, of a resource of the Model Context Protocol."""
_PLACES = ("source", "image_url", "data", "file_id")
_KINDS = ("image", "image_url", "input_image")
_BEGINNINGS = (
    "iVBORw0KGgo",
    "/9j/",
    "R0lGODlh",
    "R0lGODdh",
    "UklGR",
    "JVBERi0",
    "SUkqA",
    "TU0AKg",
    "AAAAIGZ0eXA",
    "AAAAHGZ0eXA",
)
"""PNG, JPEG, GIF, WebP (and WAV), PDF, TIFF, AVIF and HEIC (and MP4), in base64."""
_ENCODED = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")
_DIGEST = re.compile(r"[0-9a-f]{64,128}")


def unreadable(value: Any) -> bool:
    """Whether JSON carries, anywhere in it, what is no text. RecursionError for what is nested too deeply."""
    if isinstance(value, str):
        return _DATA_URL.match(value) is not None or (
            value.startswith(_BEGINNINGS) and _ENCODED.fullmatch(value) is not None
        )
    if isinstance(value, list):
        return any(unreadable(item) for item in value)
    return isinstance(value, Mapping) and (_says_so(value) or any(unreadable(item) for item in value.values()))


def _encoded(value: Any) -> bool:
    """Whether this is a text that looks like base64, and not like a digest."""
    return isinstance(value, str) and _ENCODED.fullmatch(value) is not None and _DIGEST.fullmatch(value) is None


def _says_so(block: Mapping[str, Any]) -> bool:
    """What a block says of itself."""
    if "base64" in (block.get("type"), block.get("encoding")) and any(map(_encoded, block.values())):
        return True
    if block.get("type") == "base64" and block.get("data"):
        # The form of a source, however little it holds.
        return True
    if any(_encoded(block.get(key)) for key in _ENCODED_KEYS):
        return True
    if block.get("type") in _KINDS and any(block.get(key) for key in _PLACES):
        return True
    return any(_is_media(block, key) for key in _MEDIA_KEYS)


def _is_media(block: Mapping[str, Any], key: str) -> bool:
    """Whether a block with a media type under this key carries, or stands for, what is no text."""
    media = block.get(key)
    if not isinstance(media, str) or not media:
        return False
    if not media.lower().startswith(_MEDIA):
        return not _TEXTUAL.match(media) and _encoded(block.get("data"))
    if isinstance(block.get("text"), str) or block.get("type") == "resource_link":
        # A drawing as its source, and the link of the Model Context Protocol.
        return False
    if key in _LISTED_KEYS:
        return any(_encoded(block.get(name)) for name in _CARRIES)
    return any(block.get(name) for name in (*_CARRIES, *_NAMES)) or any(map(_encoded, block.values()))
