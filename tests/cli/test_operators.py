"""`atelier operators`."""

from tests.cli.conftest import Atelier
from tests.composition import Resources
from tests.support import existing

PASSWORD = "correct horse battery"


def test_an_operator_is_created_by_a_link_or_a_password_and_deleted_with_their_sessions(atelier: Atelier) -> None:
    made = atelier.json("operators", "create", "alice")
    assert "/operators/links/" in made["url"]
    for refused in ("alice", "Alice", "a b", "<b>"):
        assert atelier("operators", "create", refused).code == 2, "its name is in use, or of other letters"
    atelier.json("operators", "create", "bob", "--password-stdin", typed=f"{PASSWORD}\n")
    listed = atelier.json("operators", "list")["operators"]
    assert [(each["name"], each["has_password"]) for each in listed] == [("alice", False), ("bob", True)]
    session = atelier.stores(_open_session_of_bob)
    assert (
        atelier.json("operators", "password", "bob", "--password-stdin", typed=f"x{PASSWORD}\n")["sessions_ended"] == 1
    )
    assert atelier.stores(lambda resources: resources.operator_sessions.get(session)) is None
    assert atelier.json("operators", "delete", "bob")["deleted"] is True
    assert atelier.stores(lambda resources: resources.operators.check_password("bob", f"x{PASSWORD}")) is None
    rows = atelier.json("audit", "--account", "operator:bob")["rows"]
    assert [row["act"] for row in rows] == ["operator_created", "password_set", "operator_deleted"]


async def _open_session_of_bob(resources: Resources) -> str:
    found = existing(await resources.operators.get("bob"))
    return await resources.operator_sessions.create("bob", credential_version=found.credential_version)
