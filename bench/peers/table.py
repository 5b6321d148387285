"""The results of all peers as tables, and their ratios to prefixd."""

from __future__ import annotations

from typing import Any

MIB = 1 << 20
OURS = ("prefixd", "prefixd-embedded", "prefixd-defaults")
KINDS = {"store": "store", "cold": "restore_cold", "warm": "restore_warm"}


def rows_of(one: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what was measured by length, store and restore together."""
    restored = {own["tokens"]: own for own in one["lengths_restored"]}
    return [{**own, **restored.get(own["tokens"], {})} for own in one["lengths"]]


def ratios(peers: list[dict[str, Any]], engines: dict[str, Any] | None) -> dict[str, Any]:
    """Returns prefixd's figures over each peer's, of the same run: rates above 1 and times below 1 are ahead."""
    out: dict[str, Any] = {}
    for ours in (one for one in peers if one["name"] in OURS):
        mine = {own["tokens"]: own for own in rows_of(ours)}
        for peer in (one for one in peers if one["shape"] == ours["shape"] and one["name"] not in OURS):
            for own in rows_of(peer):
                for kind, word in KINDS.items():
                    if (a := mine[own["tokens"]].get(kind)) and (b := own.get(kind)):
                        key = f"{ours['name']}_over_{peer['name']}_{word}_{own['tokens']}_{ours['shape']}"
                        out[key] = a["median"] / b["median"]
    out |= engine_ratios(engines)
    return out


def engine_ratios(engines: dict[str, Any] | None) -> dict[str, float]:
    """Returns prefixd's time to the first token after a restart over each peer's, inside vLLM."""
    sides = {one["name"]: one for one in engines["sides"]} if engines else {}
    out = {}
    for name, side in sides.items():
        if name in ("prefixd", "vllm") or "prefixd" not in sides:
            continue
        for ours, own in zip(sides["prefixd"]["lengths"], side["lengths"], strict=True):
            out[f"prefixd_over_{name}_ttft_{own['tokens']}"] = ours["restart"]["median"] / own["restart"]["median"]
    return out


def rate(own: dict[str, Any], kind: str) -> str:
    s = own.get(kind)
    return f"{s['median']:.2f} ({s['p25']:.2f} .. {s['p75']:.2f})" if s else "-"


def show(out: dict[str, Any]) -> None:
    print(f"{out['run']['machine']}; {out['run']['date']}; load at the start {out['load']:.1f}")
    for shape in dict.fromkeys(one["shape"] for one in out["peers"]):
        mine = [one for one in out["peers"] if one["shape"] == shape]
        print(f"\n{shape}: GB/s of rows, median (quartiles)\n")
        print(f"  {'':22} {'tokens':>6} {'store':>21} {'restore, cold':>21} {'restore, warm':>21} "
              f"{'disk':>5} {'shared':>6}")
        for one in mine:
            for own in rows_of(one):
                shared = own.get("sharing_disk_over_rows")
                print(f"  {one['title']:22} {own['tokens']:6} {rate(own, 'store'):>21} {rate(own, 'cold'):>21} "
                      f"{rate(own, 'warm'):>21} {own['disk_over_rows']:5.2f} "
                      f"{'-' if shared is None else f'{shared:.2f}':>6}")
        print("  disk: space over rows; shared: the same of a prompt whose first half is stored already\n")
        print(f"  {'':22} {'CPU s/GB stored':>15} {'behind it':>10} {'restored':>9} {'MiB storing':>12} "
              f"{'restoring':>10}  done when")
        for one in mine:
            print(f"  {one['title']:22} {one['cpu_seconds_per_gb_stored']:15.2f} "
                  f"{one['cpu_seconds_per_gb_behind']:10.2f} "
                  f"{one['cpu_seconds_per_gb_restored']:9.2f} {one['peak_bytes_storing'] / MIB:12.0f} "
                  f"{one['peak_bytes_restoring'] / MIB:10.0f}  {one['durable']}")
        show_engine(mine)
        show_damage(mine)
    show_engines(out.get("engines"))
    if out["not_run"]:
        print("\nNot run\n")
        for one in out["not_run"]:
            print(f"  {one['name']}, {one['what']}: {one['reason']}")


def show_engine(peers: list[dict[str, Any]]) -> None:
    for one in peers:
        for own in rows_of(one):
            if "first_token_computed" in own:
                computed, restored = own["first_token_computed"]["median"], own["first_token_cold"]["median"]
                print(f"\n  {one['title']}, {own['tokens']} tokens: first token {computed:.2f} s computed, "
                      f"{restored:.3f} s after a restart")
    if any(one["decode"] for one in peers):
        print(f"\n  {'decoding behind the longest prompt':44} {'bytes a token':>14} {'ms a token':>11}")
        for one in peers:
            for own in one["decode"]:
                print(f"  {one['title'] + ', ' + own['mode']:44} {own['bytes']:14,.0f} {own['seconds'] * 1e3:11.1f}")


def show_damage(peers: list[dict[str, Any]]) -> None:
    print(f"\n  {'':22} the process that writes is killed in the middle of a put; then that prompt, and an earlier one")
    for one in peers:
        for kill in one["killed"]:
            opened = "" if kill["reopened"] == "yes" else f"; opened: {kill['reopened']}"
            late = " (too late: it had returned)" if kill["put_had_returned"] else ""
            print(f"  {one['title']:22} at {kill['after']:.0%}{late}: {kill['torn'][:120]}; {kill['kept'][:120]}; "
                  f"{kill['left_bytes'] / MIB:.0f} MiB left{opened}")
    print(f"\n  {'':22} a flipped bit")
    for one in peers:
        flip = one["flipped"]
        print(f"  {one['title']:22} {flip['where']}: {flip['outcome'][:160]}")


def show_engines(engines: dict[str, Any] | None) -> None:
    if not engines:
        return
    print(f"\nInside vLLM (vllm_peers.py, {engines['run']['date']}): first token, s\n")
    for one in engines["sides"]:
        for own in one["lengths"]:
            print(f"  {one['title']:22} {own['tokens']:6} computed {own['cold']['median']:.2f}, after a restart "
                  f"{own['restart']['median']:.2f}")
