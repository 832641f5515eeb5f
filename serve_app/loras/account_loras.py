"""Use cases of an account's LoRAs: add, change, share, remove; each goes to the audit log."""

import json
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from serve_app.accounts.accounts import AccountStore
from serve_app.accounts.audit import AuditLog
from serve_app.domain.accounts import Account, Caller
from serve_app.domain.audit import OWNER, Act, Actor, account, api_key
from serve_app.domain.catalog import Offer, Terms
from serve_app.domain.errors import AdapterUnavailable, Forbidden, InvalidParameter, NotFound
from serve_app.domain.requests import Variant
from serve_app.loras.catalog import AdapterGrants, AdapterRegistry, CatalogReader, SharedAdapter
from serve_app.loras.registration import LoraRegistration, Registered, remove_lora
from serve_app.loras.weights import WeightStore
from serve_app.settings import Settings
from serve_app.store.process import Background, to_its_end

NO_SUCH = "There is no such LoRA."
_ID = re.compile(r"[A-Za-z0-9_\-]{1,128}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountActor:
    """Who acts, and from which address; `name` is the actor of the console, where no key is used."""

    caller: Caller
    address: str
    name: str = OWNER


def require_all_loras(caller: Caller) -> None:
    """Raise `Forbidden` for a key that is kept to some LoRAs: it could not use a new one."""
    if caller.adapters is not None:
        raise Forbidden("This API key is restricted to certain LoRAs and cannot add others.")


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountLoras:
    """What an account does with its LoRAs. Every method may raise `StoreUnavailable`."""

    settings: Settings
    catalog: CatalogReader
    registration: LoraRegistration
    registry: AdapterRegistry
    grants: AdapterGrants
    weights: WeightStore
    accounts: AccountStore
    audit: AuditLog
    background: Background

    async def find(self, caller: Caller, lora_id: str) -> SharedAdapter:
        """Return a LoRA that the caller's account owns or may use. Raises `NotFound`."""
        is_id = bool(_ID.fullmatch(lora_id)) and caller.may_use(lora_id)
        found = await self.catalog.adapter_of(lora_id, caller.account_id) if is_id else None
        if found is None:
            raise NotFound(NO_SUCH)
        return found

    async def add(
        self, by: AccountActor, path: Path, offer: Offer, *, place: AsyncExitStack, idempotency_key: str | None
    ) -> Registered:
        """Register the file or folder at `path`.

        A client that disconnects does not stop it, nor ends its `place`, which holds the files, before it does. Raises
        `InvalidParameter`, `IdempotencyConflict`, `LoraQuotaExceeded`, `StoreUnavailable`.
        """
        return await self.background.run_in(place, self._register(by, path, offer, idempotency_key))

    async def add_known(
        self, by: AccountActor, sha256: str, offer: Offer, *, place: AsyncExitStack, idempotency_key: str | None
    ) -> Registered:
        """Register weights that a LoRA of the account's own has.

        To know a digest is not enough: raises `NotFound` for weights that none of its LoRAs has. Raises what `add`
        raises.
        """
        usable = await self.catalog.adapters(by.caller.account_id)
        known = [each for each in usable if each.owner == by.caller.account_id and each.sha256 == sha256]
        there = next((each for each in known if each.base_model == offer.base_model), None)
        if there is not None:
            return Registered(there, "same")
        try:
            path = await self.weights.fetch(known[0])
        except (IndexError, AdapterUnavailable):
            raise NotFound("No LoRA of your account has these weights: send the file.") from None
        return await self.add(by, path, offer, place=place, idempotency_key=idempotency_key)

    async def _register(self, by: AccountActor, path: Path, offer: Offer, idempotency_key: str | None) -> Registered:
        terms = replace(await self.quota(by.caller.account_id), idempotency_key=idempotency_key)
        registered = await self.registration.register(path, offer, owner=by.caller.account_id, terms=terms)
        if registered.status == "added":
            await self._record(by, Act.LORA_ADDED, registered.adapter.id)
        return registered

    async def change(
        self,
        by: AccountActor,
        lora_id: str,
        *,
        name: str | None,
        description: str | None,
        trigger_words: Sequence[str] | None,
    ) -> SharedAdapter:
        """Change the given fields of the account's own LoRA. Raises `NotFound`."""
        words = None if trigger_words is None else json.dumps(list(trigger_words))
        given = {"name": name, "description": description, "trigger_words": words}
        fields = {field: value for field, value in given.items() if value is not None}
        found = await self._own(by.caller, lora_id)
        if not fields:
            return found
        if not await self.registry.update(lora_id, by.caller.account_id, fields):
            raise NotFound(NO_SUCH)
        await self._record(by, Act.LORA_CHANGED, lora_id)
        return await self.find(by.caller, lora_id)

    @to_its_end
    async def remove(self, by: AccountActor, lora_id: str) -> None:
        """Remove the account's own LoRA. Raises `NotFound`.

        Jobs that wait for it or run with it end as `lora_unavailable`.
        """
        await self._own(by.caller, lora_id)
        if await remove_lora(self.registry, self.registration.weights, lora_id) == "removed":
            await self._record(by, Act.LORA_REMOVED, lora_id)

    async def share(self, by: AccountActor, lora_id: str, with_whom: str) -> SharedAdapter:
        """Let another account, by its id or name, use the account's own LoRA. Raises `NotFound`, `InvalidParameter`."""
        await self._own(by.caller, lora_id)
        other = await self._other(by.caller, with_whom)
        await self.grants.grant(lora_id, other.id)
        await self._record(by, Act.LORA_GRANTED, lora_id, other=other)
        return await self.find(by.caller, lora_id)

    async def unshare(self, by: AccountActor, lora_id: str, with_whom: str) -> None:
        """End a sharing. Raises `NotFound`. Jobs of the other account with this LoRA end as `lora_unavailable`."""
        found = await self._own(by.caller, lora_id)
        other = await self._other(by.caller, with_whom)
        if other.id not in found.shared_with:
            raise NotFound("The LoRA is not shared with that account.")
        await self.grants.revoke(lora_id, other.id)
        await self._record(by, Act.LORA_REVOKED, lora_id, other=other)

    async def _own(self, caller: Caller, lora_id: str) -> SharedAdapter:
        found = await self.find(caller, lora_id)
        if found.adapter.owner != caller.account_id:
            raise NotFound(NO_SUCH)
        return found

    async def _other(self, caller: Caller, id_or_name: str) -> Account:
        other = await self.accounts.get(id_or_name)
        if other is None:
            raise NotFound("There is no such account.")
        if other.id == caller.account_id:
            raise InvalidParameter("account: must not be your own account")
        return other

    async def quota(self, account_id: str) -> Terms:
        """Return the larger quota of the account's two plans."""
        owner = await self.accounts.get(account_id)
        if owner is None:
            raise NotFound("The account was deleted meanwhile.")
        names = {Variant.A: owner.plan_a, Variant.B: owner.plan_b}
        plans = [self.settings.plan_named(variant, name) for variant, name in names.items()]
        return Terms(max_loras=max(plan.loras for plan in plans), max_bytes=max(plan.lora_bytes for plan in plans))

    async def _record(self, by: AccountActor, act: Act, lora_id: str, *, other: Account | None = None) -> None:
        """Record an act in the owner's log, and in the log of the account that it concerns.

        Each names the other account by its pseudonym.
        """
        own = by.caller.account_id
        actor = Actor(api_key(by.caller.key_id) if by.caller.key_id else by.name, by.address)
        subject = lora_id if other is None else f"{lora_id} {account(self.audit.pseudonym(other.id))}"
        await self.audit.record(own, act, actor, subject)
        if other is not None:
            await self.audit.record(other.id, act, Actor(account(self.audit.pseudonym(own))), lora_id)
