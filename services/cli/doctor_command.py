"""`gyre doctor`."""

from __future__ import annotations

from pathlib import Path

from services.cli.output import say, say_json, table


def doctor_command(file: Path | None, *, state: Path, json: bool) -> int:
    from schemas.config_file import load
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
