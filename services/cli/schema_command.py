"""`gyre schema`: the vocabulary of events as a table, as JSON schema, or as a page of the documents."""

from __future__ import annotations

from typing import Any

from services.cli.output import say, say_json, table


def schema_command(*, json: bool, markdown: bool) -> int:
    if json:
        say_json(_schemas())
    elif markdown:
        say(events_page())
    else:
        for line in table([("kind", "said by", "how often", "meaning"), *_rows()]):
            say(line)
    return 0


def _schemas() -> dict[str, Any]:
    import msgspec

    from schemas.envelope import Envelope
    from schemas.kinds import KINDS

    # Raw bytes have no JSON schema: in the envelope's, the data of any kind stands for them.
    fields = [(each.name, each.type) for each in msgspec.structs.fields(Envelope) if each.name != "data"]
    envelope = msgspec.defstruct("Envelope", [*fields, ("data", dict[str, Any])])

    kinds = list(KINDS.values())
    schemas, components = msgspec.json.schema_components(
        [envelope, *(kind.data for kind in kinds)], ref_template="#/$defs/{name}"
    )
    return {
        "envelope": schemas[0],
        "kinds": {
            kind.name: {
                "owners": kind.owners,
                "once": kind.once,
                "v": kind.v,
                "meaning": kind.meaning,
                "data": data,
            }
            for kind, data in zip(kinds, schemas[1:], strict=True)
        },
        "$defs": components,
    }


def _rows() -> list[tuple[str, str, str, str]]:
    from schemas.kinds import KINDS

    rows = []
    for kind in KINDS.values():
        owners = ", ".join(f"{owner} ({nature})" for owner, nature in kind.owners.items())
        if len(kind.owners) > 3:
            owners = f"{len(kind.owners)} services (fact)"
        rows.append((kind.name, owners, "once" if kind.once else "repeated", kind.meaning))
    return rows


def events_page() -> str:
    """docs/events.md: every kind with the fields of its data, from the table alone."""
    import msgspec

    from schemas.kinds import KINDS

    lines = [
        "# Events",
        "",
        "Made by `gyre schema --markdown` from `schemas/kinds.py` and `schemas/events/`; `gyre schema --json` gives",
        "the JSON schema. A subject is `gyre.{run}.{owner}.{entity}.{id}.{verb}`. *Once* means at most one event of the",
        "kind for an entity.",
        "",
        "| kind | said by | how often | meaning |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| `{kind}` | {owners} | {often} | {meaning} |" for kind, owners, often, meaning in _rows()]
    lines += ["", "## Data", ""]
    for kind in KINDS.values():
        fields = ", ".join(f"`{field.encode_name}`" for field in msgspec.structs.fields(kind.data))
        lines.append(f"- `{kind.name}`: {fields}")
    return "\n".join(lines)
