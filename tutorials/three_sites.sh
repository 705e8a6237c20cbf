#!/usr/bin/env bash
# A hub and three sites on this machine, with TLS and a key for each site, from nothing to a result,
# and what each of them would have found alone.
#
#   bash tutorials/three_sites.sh [FOLDER]      # default three-sites; needs botorch_fed[flower]
#
# On real machines the parts between the lines run on different ones. Only ca.crt and the study file
# go to the sites, only node.pub comes back; objectives, data and results stay where they are.
set -euo pipefail
folder=${1:-three-sites}
port=${PORT:-8000}
export OMP_NUM_THREADS=1
mkdir "$folder"
cd "$folder"
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

# ---- agreed between all: what is tuned, and how. Each site has a tuning.py of its own.
[ -f study.toml ] || cat > study.toml <<'END'
objective = "tuning:score"
agents = ["north", "south", "west"]
budget = 8
seed = 0
[space]
temperature = { type = "real", lower = 150, upper = 300 }
minutes = { type = "integer", lower = 10, upper = 60 }
steam = { type = "real", lower = 0, upper = 10 }
rest = { type = "real", lower = 0.5, upper = 6 }
[protocol]
name = "fts"
END
cat > tuning.py <<'END'
BEST = {"north": (228, 34, 6.5, 2.0), "south": (235, 31, 7.0, 1.6), "west": (224, 38, 6.0, 2.2)}


def score(agent: str, **settings: float) -> float:
    """The taste of a bread, 10 at best."""
    off = zip(settings.values(), BEST[agent], (45, 18, 3, 1.8))
    return 10 / (1 + sum(((value - best) / width) ** 2 for value, best, width in off))
END

# ---- at the hub
botorch-fed hub init hub --address localhost --port "$port"
botorch-fed hub start hub --host 127.0.0.1 > hub.log 2>&1 &

# ---- at each site
for site in north south west; do botorch-fed site init "$site"; done

# ---- at the hub: each node.pub came by a way that its operator trusts
until botorch-fed hub admit hub north north/node.pub; do sleep 1; done
botorch-fed hub admit hub south south/node.pub
botorch-fed hub admit hub west west/node.pub

# ---- at each site: ca.crt came from the hub
for site in north south west; do
  botorch-fed site start "$site" study.toml --name "$site" --hub "localhost:$port" \
    --ca hub/ca.crt > "$site.log" 2>&1 &
  pids+=($!)
done

# ---- at the hub
botorch-fed hub run hub study.toml --out run
botorch-fed hub sites hub

# ---- at each site, after `botorch-fed site start` was stopped
kill "${pids[@]}" && wait "${pids[@]}" || true
for site in north south west; do
  botorch-fed site show "$site" study.toml --name "$site" --json > "$site.json"
done

# ---- the same sites, each by itself
for site in north south west; do
  sed "s/^agents = .*/agents = [\"$site\"]/" study.toml > "$site-alone.toml"
  botorch-fed run "$site-alone.toml" --json > "$site-alone.json" 2> /dev/null &
  alone+=($!)
done
wait "${alone[@]}"
python3 - <<'END'
import json

means = {"together": 0.0, "alone": 0.0}
for site in ("north", "south", "west"):
    with open(f"{site}.json") as together, open(f"{site}-alone.json") as alone:
        best = {
            "together": max(row["y"] for row in json.load(together)["observations"]),
            "alone": json.load(alone)["best"][site]["value"],
        }
    print(f"{site}: best {best['together']:.1f} together, {best['alone']:.1f} alone")
    means = {name: mean + best[name] / 3 for name, mean in means.items()}
print(f"mean: {means['together']:.1f} together, {means['alone']:.1f} alone, of one seed")
END
