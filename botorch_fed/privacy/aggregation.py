r"""One private sum: a mechanism, a channel, and who adds the noise.

::

    noise_at   mechanism                   channel     who must be trusted with contributions
    "none"     None                        any         all to whom the channel shows them
    "agent"    DistributedGaussianSum,     any         nobody, as far as the channel hides them
               DistributedRecordSum
    "server"   GaussianSum, or one of      one that    the server
               the two above               shows them

A `PrivateSum` is public settings; secrets stay in the agents' stores. An agent calls `contribute`,
which pays its ledger, then bounds and rounds the contribution and adds its share of noise; the
integers go through the channel's `protect`, `add`, `share` and `open`. `run` does all of it in one
process, through bytes, for studies and examples.

**Guarantee.** With noise, that of the mechanism's docstring. Without, there is none: encryption
hides contributions, not their sum. Who learns the sum can fit a model to it, subtract what it
contributed itself (of two agents each learns the other's contribution), and compare sums: what
changed from one to the next belongs to whoever came, left or observed something new, and one new
record changes the gram matrix by rank one. A single agent's plaintext summary of fewer records than
features gives the raw inputs and outcomes away.

**Paying.** `contribute` pays before it looks at the values. A contribution that is then refused,
dropped or never opened stays paid: who is refused, and which rounds fail, may depend on data.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.errors import ProtocolError
from botorch_fed.privacy.accounting import Guarantee, Ledger
from botorch_fed.privacy.channels import Channel, Epoch, Gathered, Secrets
from botorch_fed.privacy.checks import check_choice
from botorch_fed.privacy.distributed import DistributedMechanism
from botorch_fed.privacy.hazmat.noise import NoiseSource, OSNoise, Path
from botorch_fed.privacy.mechanisms import GaussianSum, clip
from botorch_fed.privacy.paying import AnyLedger, pay
from botorch_fed.privacy.shared_ledger import SharedLedger

NoiseAt = Literal["agent", "server", "none"]

_DELTA = 1e-5  # of a guarantee whose ledger has no budget
_NO_GUARANTEE = "no privacy guarantee: encryption hides contributions, not their sum"


@dataclass(frozen=True, eq=False)
class SumRelease:
    """A sum, and what is known about it.

    Attributes:
        values: A `D` tensor of float64.
        guarantee: Of all releases in the ledger; None without noise.
        noise_std: The standard deviation of the noise in each number; 0 without.
        bytes_per_agent: The most that one agent sent, set-up included.
        seconds: How long everybody together took, set-up included.
        num_agents: How many contributed.
        learned_by: Who learns what, in words.
        ledger: The ledger after the release.
    """

    values: Tensor
    guarantee: Guarantee | None
    noise_std: float
    bytes_per_agent: int
    seconds: float
    num_agents: int
    learned_by: str
    ledger: Ledger | SharedLedger | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        promise = _NO_GUARANTEE if self.guarantee is None else str(self.guarantee)
        return (
            f"SumRelease({self.values.numel()} numbers from {self.num_agents} agents, "
            f"{self.bytes_per_agent} bytes each; {self.learned_by}; {promise})"
        )


@dataclass(frozen=True, kw_only=True)
class PrivateSum:
    """A sum over agents: what bounds and noises it, what carries it, and where the noise is added.

    Attributes:
        mechanism: See the module; None for a sum without privacy guarantee.
        channel: How contributions reach the sum.
        noise_at: Who adds the noise: every "agent" its share, the "server", or nobody.

    Raises:
        InputDataError: The three do not go together.

    Example:
        >>> mechanism = DistributedGaussianSum(
        ...     dim=3, num_agents=4, clip_norm=1.0, noise_multiplier=0.5, colluding=1
        ... )
        >>> private_sum = PrivateSum(
        ...     mechanism=mechanism, channel=PlainChannel(mechanism.grid), noise_at="agent"
        ... )
        >>> release = private_sum.run({f"site-{i}": torch.ones(3) for i in range(4)})
        >>> release.guarantee.accountant, release.guarantee.unit
        ('dp-accounting-rdp', 'agent')
    """

    mechanism: DistributedMechanism | GaussianSum | None
    channel: Channel
    noise_at: NoiseAt

    def __post_init__(self) -> None:
        check_choice("noise_at", self.noise_at, NoiseAt)
        mechanism = self.mechanism
        if (mechanism is None) != (self.noise_at == "none"):
            raise InputDataError(
                'A sum without a mechanism has noise_at="none" and the other way round, got '
                f"{mechanism!r} and {self.noise_at!r}."
            )
        if mechanism is None:
            return
        if self.noise_at == "server" and not self.channel.server_sees_contributions:
            raise InputDataError(
                f"The server can not add noise to sums over a {type(self.channel).__name__}, "
                'which it can not read: let the agents add it, noise_at="agent".'
            )
        if isinstance(mechanism, GaussianSum):
            self._check_gaussian(mechanism)
        elif not isinstance(mechanism, DistributedMechanism):
            raise InputDataError(
                "A mechanism is a DistributedGaussianSum, a DistributedRecordSum or, for noise at "
                f"the server, a GaussianSum; got {type(mechanism).__name__}."
            )
        elif mechanism.grid != self.channel.grid:
            raise InputDataError(
                f"The mechanism is calibrated to {mechanism.grid}, the channel adds on "
                f"{self.channel.grid}: give both the same grid."
            )

    def _check_gaussian(self, mechanism: GaussianSum) -> None:
        grid = self.channel.grid
        if self.noise_at == "agent":
            raise InputDataError(
                "GaussianSum needs a trusted server: for noise at the agents use "
                "DistributedGaussianSum, whose noise lives on the grid."
            )
        if mechanism.weight != 1:
            raise InputDataError(
                f"A PrivateSum adds, but the weight is {mechanism.weight:g}: set weight=1.0."
            )
        if mechanism.dim != grid.dim or mechanism.num_agents > grid.num_agents:
            raise InputDataError(
                f"The grid is for {grid.num_agents} contributions of {grid.dim} numbers, the "
                f"mechanism for {mechanism.num_agents} of {mechanism.dim}: give both the same."
            )
        if mechanism.clip_norm > grid.bound:
            raise InputDataError(
                f"The clip norm {mechanism.clip_norm:g} exceeds the bound {grid.bound:g} of the "
                "grid: choose a wider grid."
            )

    # ---- an agent's part

    def contribute(
        self, values: Tensor, *, ledger: AnyLedger | None, noise: NoiseSource, path: Path
    ) -> tuple[Tensor, AnyLedger | None]:
        """Pay, then bound and round the agent's contribution and add its share of noise.

        Args:
            values: A `D` tensor; for a `DistributedRecordSum` an `n x (m + 1)` tensor of records.
            ledger: Pays for the sum if noise is added here; may be None if it is not.
            noise: The agent's source.
            path: What the sum is for, and the agent's name: one path for one contribution.

        Returns:
            A `D` tensor of int64 for `channel.protect`, and the ledger after it.

        Raises:
            BudgetExceeded: The ledger does not cover the sum; nothing was computed.
            InputDataError: The contribution is not finite, or does not fit. It was paid for.
        """
        mechanism = self.mechanism
        if self.noise_at != "agent" or not isinstance(mechanism, DistributedMechanism):
            return self._bounded(values), ledger
        if ledger is None:
            raise InputDataError("Noise costs privacy: pass the ledger that pays for it.")
        ledger = self._paid(ledger, noise)
        return mechanism.contribution(values, noise=noise, path=path), ledger

    def _paid(self, ledger: AnyLedger, noise: NoiseSource) -> AnyLedger:
        assert self.mechanism is not None  # guaranteed by noise_at
        return pay(self.mechanism, ledger, private=noise.private)

    def _bounded(self, values: Tensor) -> Tensor:
        """A contribution without noise."""
        if isinstance(self.mechanism, DistributedMechanism):
            return self.mechanism.bounded(values)
        if self.mechanism is not None:
            values = clip(values, self.mechanism.clip_norm)
        return self.channel.grid.to_integers(values)

    # ---- a trusted server's part

    def release(
        self,
        payloads: Mapping[str, bytes],
        *,
        epoch: Epoch,
        round: int,
        ledger: AnyLedger,
        noise: NoiseSource,
        path: Path,
    ) -> tuple[Tensor, AnyLedger]:
        """Pay, then add what arrived, with noise: for noise at the server.

        Args:
            payloads: What agents protected, by name.
            epoch: The epoch, whose roster numbers the agents.
            round: Which sum.
            ledger: Pays for it before anything is computed.
            noise: The server's source.
            path: What the sum is for: one path for one release.

        Returns:
            A `D` tensor of float64, and the ledger after it.
        """
        mechanism, channel = self.mechanism, self.channel
        if self.noise_at != "server" or mechanism is None:
            raise ProtocolError(f"The server adds no noise to a sum with {self.noise_at=}.")
        if isinstance(mechanism, DistributedMechanism):
            ledger = self._paid(ledger, noise)
            total = channel.open(
                channel.add(payloads, epoch=epoch, round=round), {}, epoch=epoch, round=round
            )
            noised = total + mechanism.whole_noise(noise=noise, path=path)
            return channel.grid.to_values(noised), ledger
        contributions = {}
        for index, name in enumerate(sorted(epoch.roster)):
            if name in payloads:
                one = channel.add({name: payloads[name]}, epoch=epoch, round=round)
                integers = channel.open(one, {}, epoch=epoch, round=round)
                contributions[index] = channel.grid.to_values(integers)
        released, ledger = mechanism.release(contributions, ledger=ledger, noise=noise, path=path)
        return released.values[0], ledger

    # ---- everything in one process

    def run(
        self,
        contributions: Mapping[str, Tensor],
        *,
        ledger: Ledger | SharedLedger | None = None,
        noise: NoiseSource | None = None,
        path: Path = (),
        secrets: Mapping[str, Secrets] | None = None,
        epoch: Epoch | None = None,
        round: int = 0,
    ) -> SumRelease:
        """All phases of one sum in this process, through bytes: for studies and examples.

        It plays every part, so its caller sees everything. One ledger stands for all
        agents', whose entries would be equal.

        Args:
            contributions: By agent, as for `contribute`.
            ledger: Pays before anything is computed; by default one that only counts.
            noise: The source of all agents' noise; by default the operating system.
            path: What the sum is for.
            secrets: The agents' stores, where a channel needs keys in them beforehand.
            epoch: By default one of all contributors.
            round: Which sum of the epoch.

        Raises:
            BudgetExceeded: The ledger does not cover the sum; nothing was computed.
            ProtocolError: Too few or too many contributions.
        """
        names = tuple(sorted(contributions))
        self._check_count(len(names))
        started = time.perf_counter()
        noise = OSNoise() if noise is None else noise
        mechanism = self.mechanism
        account: Any = ledger  # of either kind, and so it stays
        if mechanism is None:
            account = None
        elif ledger is None:
            account = Ledger(adjacency=mechanism.adjacency, unit=mechanism.unit)
        if self.noise_at == "agent":
            account = self._paid(account, noise)
        exchange = _Exchange(
            self.channel,
            Epoch("run", 0, names) if epoch is None else epoch,
            round,
            {name: _Drawer() for name in names} if secrets is None else secrets,
        )
        payloads = exchange.protected(
            {name: self._integers(contributions[name], noise, (*path, name)) for name in names}
        )
        if self.noise_at == "server":
            values, account = self.release(
                payloads,
                epoch=exchange.epoch,
                round=round,
                ledger=account,
                noise=noise,
                path=(*path, "server"),
            )
        else:
            values = self.channel.grid.to_values(exchange.opened(payloads))
        return SumRelease(
            values=values,
            guarantee=None if account is None else _guarantee(account),
            noise_std=self._noise_std(len(names)),
            bytes_per_agent=max(exchange.sent.values()),
            seconds=time.perf_counter() - started,
            num_agents=len(names),
            learned_by=self.learned_by,
            ledger=account,
        )

    def _integers(self, values: Tensor, noise: NoiseSource, path: Path) -> Tensor:
        """What one agent protects; it has been paid for."""
        if self.noise_at == "agent" and isinstance(self.mechanism, DistributedMechanism):
            return self.mechanism.contribution(values, noise=noise, path=path)
        return self._bounded(values)

    def _check_count(self, count: int) -> None:
        mechanism = self.mechanism
        most = self.channel.grid.num_agents if mechanism is None else mechanism.num_agents
        least = 1
        if self.noise_at == "agent" and isinstance(mechanism, DistributedMechanism):
            least = mechanism.num_agents - mechanism.dropping
        if not least <= count <= most:
            raise ProtocolError(
                f"{count} agents contribute, the settings are for {least} to {most}: with fewer "
                "the noise does not suffice, with more the sum does not fit."
            )

    def _noise_std(self, count: int) -> float:
        mechanism = self.mechanism
        if mechanism is None:
            return 0.0
        if isinstance(mechanism, GaussianSum):
            return float(mechanism.noise_std[0])
        if self.noise_at == "server":
            return mechanism.noise_scale
        return float(mechanism.agent_std * count**0.5)

    @property
    def learned_by(self) -> str:
        """Who learns what, in words."""
        if self.channel.server_sees_contributions:
            noised = " with its own share of noise only" if self.noise_at == "agent" else ""
            return f"the server reads every contribution{noised}, all agents learn the sum"
        if self.channel.opened_by == "agents" and self.channel.open_phases:
            return "all agents learn the sum, the server does not, contributions open to nobody"
        if self.channel.opened_by == "agents":
            return (
                "every agent opens the sum, the server can not unless an agent lends it the key, "
                "which opens contributions too"
            )
        return "the server and all agents learn the sum, contributions open to nobody"


def _guarantee(ledger: Ledger | SharedLedger) -> Guarantee:
    return ledger.guarantee(delta=_DELTA if ledger.budget is None else None)


class _Drawer:
    """An agent's store for as long as a run lasts."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        return self._data.get(name)

    def put_new(self, name: str, data: bytes) -> None:
        if name in self._data:
            raise ProtocolError("A secret of this name exists already.")
        self._data[name] = bytes(data)

    def delete(self, name: str) -> None:
        self._data.pop(name, None)

    def names(self) -> list[str]:
        return sorted(self._data)


class _Exchange:
    """All agents of an epoch and the server between them; it counts what agents send."""

    def __init__(
        self, channel: Channel, epoch: Epoch, round: int, secrets: Mapping[str, Secrets]
    ) -> None:
        self.channel = channel
        self.epoch = epoch
        self.round = round
        self.secrets = secrets
        self.sent = dict.fromkeys(sorted(epoch.roster), 0)

    def protected(self, integers: Mapping[str, Tensor]) -> dict[str, bytes]:
        """Set up the epoch; then everybody's contribution, ready to be added."""
        channel, epoch, round = self.channel, self.epoch, self.round
        gathered: Gathered = ()
        for phase in range(channel.setup_phases):
            messages = {
                name: channel.prepare(phase, epoch, name, gathered, self.secrets[name])
                for name in self.sent
            }
            self._counted(messages)
            gathered = (*gathered, channel.gather(messages, epoch=epoch, gathered=gathered))
        payloads = {}
        for name, own in integers.items():
            key = channel.joint_key(epoch, gathered, me=name, secrets=self.secrets[name])
            payloads[name] = channel.protect(
                own, epoch=epoch, round=round, me=name, key=key, secrets=self.secrets[name]
            )
            channel.check(payloads[name], epoch=epoch, round=round, sender=name)
        return self._counted(payloads)

    def opened(self, payloads: Mapping[str, bytes]) -> Tensor:
        """The sum of contributions, opened by a party that may."""
        channel, epoch, round = self.channel, self.epoch, self.round
        total = channel.add(payloads, epoch=epoch, round=round)
        shares: dict[str, bytes] = {}
        for _ in range(channel.open_phases):
            request = channel.request(total)
            for name in payloads:
                shares[name] = channel.share(
                    request, epoch=epoch, round=round, me=name, secrets=self.secrets[name]
                )
                channel.check_share(
                    shares[name], epoch=epoch, round=round, sender=name, total=total
                )
        self._counted(shares)
        store = self.secrets[next(iter(payloads))] if channel.opened_by == "agents" else None
        return channel.open(total, shares, epoch=epoch, round=round, secrets=store)

    def _counted(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        for name, message in messages.items():
            self.sent[name] += len(message)
        return messages
