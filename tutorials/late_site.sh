#!/usr/bin/env bash
# A hub and three sites on this machine; a fourth one joins while the study runs.
#
#   bash tutorials/late_site.sh [FOLDER]      # default late-site; needs botorch_fed[flower]
#
# On real machines the parts between the lines run on different ones. North, south and west change
# nothing when east joins: their copies of the study name the sites of before.
set -euo pipefail
folder=${1:-late-site}
port=${PORT:-8020}
export OMP_NUM_THREADS=1
mkdir "$folder"
cd "$folder"
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

# ---- agreed between all: what is tuned, and how. Each site has a tuning.py of its own.
cat > study.toml <<'END'
objective = "tuning:score"
agents = ["north", "south", "west"]
budget = 8
seed = 0
[space]
temperature = { type = "real", lower = 150, upper = 250 }
minutes = { type = "integer", lower = 10, upper = 60 }
[outcome]
name = "yield"
[protocol]
name = "fts"
END
cat > tuning.py <<'END'
BEST = {"north": (190, 34), "south": (195, 31), "west": (188, 38), "east": (192, 33)}


def score(agent: str, temperature: float, minutes: int) -> float:
    warm, long = BEST[agent]
    return 1 - ((temperature - warm) / 50) ** 2 - ((minutes - long) / 25) ** 2
END

# ---- at the hub
botorch-fed hub init hub --address localhost --port "$port"
botorch-fed hub start hub --host 127.0.0.1 > hub.log 2>&1 &
for site in north south west east; do botorch-fed site init "$site"; done
until botorch-fed hub admit hub north north/node.pub 2>/dev/null; do sleep 1; done
botorch-fed hub admit hub south south/node.pub
botorch-fed hub admit hub west west/node.pub

# ---- at north, south and west
start_site() {
  botorch-fed site start "$1" "$2" --name "$1" --hub "localhost:$port" --ca hub/ca.crt \
    > "$1.log" 2>&1 &
  sites+=($!)
}
for site in north south west; do start_site "$site" study.toml; done

# ---- at the hub: the study runs for some rounds, then its operator stops it (or by Ctrl-C)
botorch-fed hub run hub study.toml --out run --deadline 60 > run.log 2>&1 & running=$!
until grep -q '"round": 4' run/rounds.jsonl 2>/dev/null; do sleep 1; done
kill "$running"
wait "$running" || true

# ---- at the hub: one name more at the end of the list, and the key that east has sent
sed 's/"west"\]/"west", "east"]/' study.toml > with-east.toml
botorch-fed run with-east.toml --dry-run | grep roster
botorch-fed hub admit hub east east/node.pub

# ---- at east
start_site east with-east.toml

# ---- at the hub
botorch-fed hub run hub with-east.toml --out run --deadline 60 --resume
botorch-fed hub sites hub

# ---- at each site, after `botorch-fed site start` was stopped
kill "${sites[@]}" && wait "${sites[@]}" || true
for site in north south west; do botorch-fed site show "$site" study.toml --name "$site"; done
botorch-fed site show east with-east.toml --name east
