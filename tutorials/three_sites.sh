#!/usr/bin/env bash
# A hub and three sites on this machine, with TLS and a key for each site, from nothing to a result.
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
budget = 5
seed = 0
[space]
temperature = { type = "real", lower = 150, upper = 250 }
minutes = { type = "integer", lower = 10, upper = 60 }
[outcome]
centre = 0.5
scale = 0.5
[protocol]
name = "fts"
END
cat > tuning.py <<'END'
BEST = {"north": (190, 34), "south": (195, 31), "west": (188, 38)}


def score(agent: str, temperature: float, minutes: int) -> float:
    warm, long = BEST[agent]
    return 1 - ((temperature - warm) / 50) ** 2 - ((minutes - long) / 25) ** 2
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
for site in north south west; do botorch-fed site show "$site" study.toml --name "$site"; done
