"""`gyre doctor` and `gyre schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.cli.output import say, say_json, table


def doctor_command(file: Path | None, *, state: Path, json: bool) -> int:
    from schemas.config import load
    from schemas.errors import EnvironmentMissing
    from services.cli.checks import doctor
    from services.cli.places import Places

    findings = doctor(Places(state), load(file) if file else None)
    ok = all(finding.ok or not finding.required for finding in findings)
    if json:
        say_json({"ok": ok, "checks": findings})
    else:
        rows = [
            ("ok" if each.ok else "MISSING" if each.required else "absent", each.name, each.detail) for each in findings
        ]
        for line in table(rows):
            say(line)
        for each in findings:
            if not each.ok:
                say(f"  {each.name} -> {each.remedy}")
    return 0 if ok else EnvironmentMissing.exit_code


def schema_command(*, json: bool) -> int:
    import msgspec

    from schemas.envelope import Envelope
    from schemas.kinds import KINDS

    # Raw bytes have no JSON schema: in the envelope's, the data of any kind stands for them.
    fields = [(each.name, each.type) for each in msgspec.structs.fields(Envelope) if each.name != "data"]
    envelope = msgspec.defstruct("Envelope", [*fields, ("data", dict[str, Any])])

    if json:
        kinds = list(KINDS.values())
        schemas, components = msgspec.json.schema_components(
            [envelope, *(kind.data for kind in kinds)], ref_template="#/$defs/{name}"
        )
        say_json(
            {
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
        )
        return 0
    rows = [("kind", "said by", "how often", "meaning")]
    for kind in KINDS.values():
        owners = ", ".join(f"{owner} ({nature})" for owner, nature in kind.owners.items())
        if len(kind.owners) > 3:
            owners = f"{len(kind.owners)} services (fact)"
        rows.append((kind.name, owners, "once" if kind.once else "repeated", kind.meaning))
    for line in table(rows):
        say(line)
    return 0
