"""Removes each protection once: the test beside it has to fail.

A test that passes without what it is about is a defect. The points are those of the review of November 2026.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("serve_app", "deployments", "tests", "configs", "pyproject.toml")
"""What a defect may be planted in, or finds its files by its own place; everything else is linked."""
LIMIT_S = 300.0
FAILED = 1
"""pytest's exit code when tests failed, and nothing else went wrong."""


@dataclass(frozen=True, slots=True)
class Protection:
    """In `file`, the text `old`, which occurs once, becomes `new`; then `test` fails.

    Where several layers protect, each by itself, `also` has the file, old and new text of the others.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    also: tuple[tuple[str, str, str], ...] = ()

    @property
    def changes(self) -> tuple[tuple[str, str, str], ...]:
        return ((self.file, self.old, self.new), *self.also)


HELD_IN_PROXY = "tests/deployments/test_proxy.py::"
IN_CONSOLE = "tests/console/"
IN_API = "tests/api/"
IN_BROWSER = "tests/browser/test_security.py::"
ONE_MACHINE, UP_ENDS = "tests/deployments/test_one_machine.py::", "tests/deployments/test_up_ends.py::"
LISTENERS, DOCTOR = "tests/attack/test_listeners.py::", "tests/cli/test_doctor.py::"
FRONTEND, DEFAULTS = "deployments/proxy/frontend.cfg", "deployments/proxy/defaults.cfg"

PROTECTIONS: tuple[Protection, ...] = (
    # 1. seeds, and company in a batch
    Protection(
        "all 64 bits of a seed count",
        "serve_app/engine/seeds.py",
        "    if seed < TORCH_SEEDS:\n        return generator\n",
        "    return generator\n",
        "tests/engine/test_seeds.py::test_a_larger_seed_is_the_mersenne_twisters_init_by_array",
    ),
    Protection(
        "a DoRA neighbour changes nothing",
        "serve_app/engine/lora_layers.py",
        "        y *= self.gain\n",
        "        y *= self.gain * (1 + 1e-6)\n",
        "tests/engine/test_batch_invariance.py::test_every_adapter_keeps_its_latents_beside_every_other",
    ),
    # 2. listeners
    Protection(
        "Ray listens on loopback alone",
        "deployments/one_machine.py",
        "    use_loopback()\n",
        "",
        "tests/deployments/test_one_machine.py::test_serve_run_reads_of_the_file_that_ray_stays_on_loopback",
    ),
    Protection(
        "the port between deployments is bound to the node's address",
        "deployments/ray_internals.py",
        'wanted.replace("[::]:", f"{host}:")',
        "wanted",
        LISTENERS + "test_every_listener_is_on_loopback",
    ),
    Protection(
        "other users of the machine cannot call Ray",
        "deployments/runtime.py",
        "environment | encryption(self._home)",
        "environment",
        LISTENERS + "test_another_user_of_the_machine_cannot_call_ray",
    ),
    Protection(
        "up ends when Ray has died",
        "deployments/runtime.py",
        "        threading.Thread(target=self._watch, args=[on_death], daemon=True).start()\n",
        "",
        UP_ENDS + "test_ray_that_dies",
    ),
    Protection(
        "nothing is deployed without token, TLS and the proxy's protection",
        "deployments/app.py",
        "    require_protection(settings, spread=spread)\n",
        "",
        ONE_MACHINE + "test_without_token_encryption_and_the_proxys_protection_nothing_is_deployed",
    ),
    Protection(
        "token authentication is demanded",
        "deployments/protection.py",
        "[*_of_token(), ",
        "[",
        ONE_MACHINE + "test_without_token_encryption_and_the_proxys_protection_nothing_is_deployed",
    ),
    Protection(
        "the proxy's protection is demanded",
        "deployments/protection.py",
        ", *of_proxy(os.environ, spread=spread)]",
        "]",
        ONE_MACHINE + "test_without_token_encryption_and_the_proxys_protection_nothing_is_deployed",
    ),
    Protection(
        "TLS is demanded between machines",
        "deployments/protection.py",
        "    if spread:\n        found",
        "    if False:\n        found",
        ONE_MACHINE + "test_without_token_encryption_and_the_proxys_protection_nothing_is_deployed",
    ),
    Protection(
        "serve run joins no Ray that already runs",
        "deployments/one_machine.py",
        "    refuse_running_ray(sys.argv)\n",
        "",
        ONE_MACHINE + "test_serve_run_joins_no_ray_that_was_started_without_the_protection",
    ),
    Protection(
        "Ray's token is its owner's alone",
        "deployments/one_machine.py",
        "        RAY_TOKEN.chmod(PRIVATE)",
        "        pass",
        ONE_MACHINE + "test_rays_token_is_its_owners_alone",
    ),
    # 3. half-sent forms
    Protection(
        "a form has a size",
        "serve_app/api/site/forms.py",
        "limit=FORM_BYTES",
        "limit=1 << 30",
        IN_CONSOLE + "test_forms.py::test_a_form_that_is_too_large_is_refused",
    ),
    Protection(
        "a form has few fields",
        "serve_app/api/site/forms.py",
        ", max_num_fields=MAX_FIELDS",
        "",
        IN_CONSOLE + "test_forms.py::test_a_form_of_many_fields_is_refused",
    ),
    # 4. slow clients
    Protection(
        "one address has a share of the connections",
        FRONTEND,
        "    tcp-request connection reject if { sc0_conn_cur gt @CONNECTIONS_PER_ADDRESS@ } !from_this_machine !from_trusted_proxy\n",
        "",
        HELD_IN_PROXY + "test_one_address_can_neither_take_all_connections_nor_read_the_routes",
    ),
    Protection(
        "headers have to arrive in time",
        DEFAULTS,
        "    timeout http-request 10s\n",
        "",
        HELD_IN_PROXY + "test_headers_have_to_arrive_in_time",
    ),
    # 5. answers that are not the application's
    Protection(
        "a caller does not set Serve's time limit",
        FRONTEND,
        "    http-request del-header x-request-timeout-seconds\n",
        "",
        HELD_IN_PROXY + "test_a_header_that_serve_or_the_application_would_obey_does_not_pass",
    ),
    Protection(
        "a request id is fit for logs",
        FRONTEND,
        "-m reg ^[A-Za-z0-9._-]{8,128}$ }",
        "-m reg ^.*$ }",
        HELD_IN_PROXY + "test_a_request_id_that_is_not_fit_for_logs_is_replaced",
    ),
    Protection(
        "nobody is believed about an address",
        FRONTEND,
        "    http-request set-header X-Forwarded-For %[var(txn.client)]\n",
        "",
        HELD_IN_PROXY + "test_nobody_is_believed_about_his_address_by_default",
    ),
    Protection(
        "an error of Serve has the contract's form",
        FRONTEND,
        "if { status 500:599 } !from_application",
        "if { status 599 } !from_application",
        HELD_IN_PROXY + "test_an_answer_of_serve_itself_gets_the_contracts_form",
    ),
    Protection(
        "a strange method is one that no address takes",
        FRONTEND,
        "    http-request set-method TRACE unless { method DELETE GET HEAD OPTIONS PATCH POST PUT }\n",
        "",
        HELD_IN_PROXY + "test_a_strange_method_reaches_the_application_as_one_that_no_address_takes",
    ),
    Protection(
        "Serve's own addresses are for this machine",
        FRONTEND,
        " if { path,url_dec -m beg /-/ } !{ path /-/healthz } !from_this_machine",
        " if { path /never }",
        HELD_IN_PROXY + "test_one_address_can_neither_take_all_connections_nor_read_the_routes",
    ),
    Protection(
        "another user of the machine does not command HAProxy",
        "deployments/proxy/harden.awk",
        '" mode 600 "',
        '" mode 666 "',
        HELD_IN_PROXY + "test_what_belongs_to_operators_is_closed_to_others",
    ),
    Protection(
        "a proxy without its protection does not start",
        "deployments/proxy/harden.awk",
        "        exit 3\n",
        "",
        HELD_IN_PROXY + "test_a_configuration_that_is_not_known_is_not_started",
    ),
    Protection(
        "the request id in an error's header is safe without a proxy too",
        "serve_app/api/middleware.py",
        "return given if _REQUEST_ID.fullmatch(given) else",
        "return given if given else",
        IN_API + "test_headers.py::test_an_unfit_request_id_is_replaced",
    ),
    Protection(
        "what is not HTTP gets no answer of HAProxy's own",
        FRONTEND,
        "    errorfile 400 /dev/null\n",
        "",
        HELD_IN_PROXY + "test_what_is_not_http_is_closed_without_an_answer",
    ),
    Protection(
        "HAProxy's own errors have the contract's form",
        DEFAULTS,
        "    http-error status 503 ",
        "    # http-error status 503 ",
        HELD_IN_PROXY + "test_without_a_replica_the_answer_is_503",
    ),
    Protection(
        "a request names its host",
        FRONTEND,
        "unless { req.fhdr(host) -m reg ^[A-Za-z0-9._:[\\]-]{1,255}$ }",
        "if { path /never }",
        HELD_IN_PROXY + "test_a_request_without_a_host_is_refused",
    ),
    Protection(
        "HAProxy proves itself to replicas",
        FRONTEND,
        "    http-request set-header X-Atelier-Proxy @SECRET@\n",
        "",
        HELD_IN_PROXY + "test_every_request_carries_what_replicas_believe_haproxy_by",
    ),
    # 6. sign-in
    Protection(
        "a forged client address changes nothing",
        "serve_app/api/client_address.py",
        "    elif not _is_trusted(_parse(peer), trusted):\n",
        "    elif not forwarded:\n",
        IN_CONSOLE + "test_throttle.py::test_a_forged_client_address_changes_nothing",
    ),
    Protection(
        "a known device is signed",
        "serve_app/api/console/known_device.py",
        'return hmac.digest(key, content.encode(errors="replace"), "sha256").hex()',
        'return ""',
        IN_CONSOLE + "test_throttle.py::test_a_device_that_was_not_made_known_is_unknown",
    ),
    Protection(
        "the time of a sign-in tells nothing of a name",
        "serve_app/stores/passwords.py",
        "stored or self._decoy",
        'stored or ""',
        "tests/stores/test_passwords.py::test_no_password_takes_as_long_as_a_wrong_one",
    ),
    Protection(
        "a form of another site is refused",
        "serve_app/api/site/protection.py",
        " and not self._is_own_form(headers):",
        " and False:",
        IN_CONSOLE + "test_protection.py::test_a_post_that_another_site_sends_is_refused",
    ),
    Protection(
        "a form of another site does nothing in a browser: by the cookie's rule, its origin and its token",
        "serve_app/api/site/protection.py",
        " and not self._is_own_form(headers):",
        " and False:",
        IN_BROWSER + "test_a_form_of_another_site_makes_no_key",
        also=(
            ("serve_app/api/console/session.py", '        samesite="lax",\n', "        samesite=None,\n"),
            (
                "serve_app/api/console/keys.py",
                "    if nonce is None:\n        raise HTTPException(403, EXPIRED_FORM)\n",
                '    nonce = nonce or "none"\n',
            ),
        ),
    ),
    Protection(
        "a browser's session is a new one after signing in",
        "serve_app/api/console/account.py",
        "    set_session(request, response, token)\n",
        '    if "atelier_session" not in request.cookies:\n        set_session(request, response, token)\n',
        IN_BROWSER + "test_signing_in_replaces_a_session_that_was_set_beforehand",
    ),
    # 7. what a job may and shows
    Protection(
        "a run of B never goes back to queued",
        "serve_app/api/variant_b/schemas.py",
        " and job.started_at is None:",
        ":",
        IN_API + "test_records.py::test_a_run_that_lost_its_worker_is_not_queued_again",
    ),
    # 8. other users of the machine
    Protection(
        "the data directory is private",
        "serve_app/atomic_files.py",
        "PRIVATE_FOLDER = 0o700",
        "PRIVATE_FOLDER = 0o755",
        "tests/stores/test_data_directory.py::test_every_folder_and_file_is_private",
    ),
    # 9. a full disk, and a start that fails
    Protection(
        "a disk keeps its reserve",
        "serve_app/stores/disk_reserve.py",
        "        if self._short is not None:\n",
        "        if False:\n",
        "tests/stores/test_disk_reserve.py::test_a_job_is_refused_and_its_caller_asked_to_try_again",
    ),
    Protection(
        "the adapter files of a machine stay within their limit",
        "serve_app/stores/weights.py",
        "        self._cache.make_space()\n",
        "",
        "tests/stores/test_weight_cache.py::test_beyond_the_limit_the_files_that_were_used_longest_ago_go",
    ),
    Protection(
        "adapter files in use stay",
        "serve_app/stores/weight_cache.py",
        "            if entry.used > until or (",
        "            if (",
        "tests/stores/test_weight_cache.py::test_files_in_use_stay_beyond_the_limit",
    ),
    Protection(
        "a service whose generator cannot start is not ready",
        "serve_app/service/readiness.py",
        "    if failure is not None:\n",
        "    if False:\n",
        "tests/service/test_readiness.py::test_a_generator_that_cannot_start_is_named_with_its_reason",
    ),
    Protection(
        "a signal while Ray starts leaves nothing",
        "deployments/one_machine_start.py",
        ", child.uninterruptible():",
        ":",
        UP_ENDS + "test_a_signal_while_ray_starts",
    ),
    Protection(
        "a start that takes too long is reported in one line",
        "deployments/runtime.py",
        "        except Exception as error:  # Ray raises a plain one",
        "        except KeyError as error:  # Ray raises a plain one",
        UP_ENDS + "test_a_start_that_takes_too_long",
    ),
    Protection(
        "the working directory is not on the workers' path",
        "deployments/runtime.py",
        "        os.chdir(self._home)",
        "        os.getcwd()",
        LISTENERS + "test_every_listener_is_on_loopback",
    ),
    Protection(
        "the doctor tells of a disk below the reserve",
        "serve_app/service/doctor/machine.py",
        "        if free < settings.disk_reserve:\n",
        "        if False:\n",
        DOCTOR + "test_a_disk_below_the_reserve_fails",
    ),
    Protection(
        "the doctor tells of what other users can open",
        "serve_app/service/doctor/machine.py",
        "        if paths:\n",
        "        if False:\n",
        DOCTOR + "test_what_other_users_can_open_is_named",
    ),
    Protection(
        "the doctor looks at Ray's token and HAProxy's socket",
        "serve_app/service/doctor/machine.py",
        ", *_private_places(os.environ)]",
        "]",
        DOCTOR + "test_a_token_or_a_socket_that_other_users_can_open_is_named",
    ),
    # 10. smaller
    Protection(
        "metrics are the operator's",
        "serve_app/api/ops.py",
        '@router.get("/metrics", dependencies=OPERATOR_ONLY)',
        '@router.get("/metrics")',
        IN_API + "test_ops.py::test_what_tells_of_other_tenants_is_the_operators",
    ),
    Protection(
        "an account has a number of keys",
        "serve_app/stores/scripts/create_key.lua",
        "if working_keys(account, '') >= max_keys then",
        "if false then",
        IN_CONSOLE + "test_keys.py::test_an_account_with_too_many_keys_gets_no_more_and_learns_why",
    ),
    Protection(
        "polls have a bound",
        "serve_app/api/dependencies.py",
        "    if poll.auth.limited:\n",
        "    if False:\n",
        IN_API + "test_poll_limit.py::test_polls_beyond_the_bound_wait_a_second",
    ),
    Protection(
        "stored weights are those of the catalog",
        "serve_app/stores/weights.py",
        "        if digest != adapter.sha256:\n",
        "        if False:\n",
        "tests/stores/test_weights.py::test_stored_weights_that_were_changed_are_replaced",
    ),
    Protection(
        "a header is parsed in another process",
        "serve_app/stores/weights.py",
        "        check_in_subprocess(path)\n",
        "        from serve_app.safetensors_file import check_safetensors\n        check_safetensors(path)\n",
        "tests/stores/test_weights.py::test_a_header_that_takes_memory_to_parse_takes_none_of_this_process",
    ),
    Protection(
        "an address ends when its account is disabled",
        "serve_app/api/files.py",
        '        if not await resources.image_access.is_open(name.split("/")[-2]):\n            raise NotFound("There is no such image.")\n',
        "",
        IN_API + "test_files.py::test_an_address_ends_when_its_account_is_disabled",
    ),
    Protection(
        "an address is signed",
        "serve_app/api/files.py",
        " or not images.verify(name, exp, kid, sig):",
        ":",
        IN_API + "test_files.py::test_a_changed_address_is_not_found",
    ),
    Protection(
        "a known caller sees its own plan",
        "serve_app/api/middleware.py",
        "context.window = await caller_window(self._authenticator, inner, context, status)",
        "pass",
        IN_API + "test_headers.py::test_a_known_caller_sees_its_own_plan_where_nothing_asks_for_a_key",
    ),
    Protection(
        "a key reads only within its scope",
        "serve_app/api/dependencies.py",
        "    _check_scope(_known_caller(RequestContext.of(request), poll.auth), Scope.READ)\n",
        "    _known_caller(RequestContext.of(request), poll.auth)\n",
        IN_API + "test_key_scopes.py::test_reading_takes_the_scope_read",
    ),
    Protection(
        "401 helps the holder of a key of the other interface",
        "serve_app/api/dependencies.py",
        'raise Unauthorized(other or "The API key is not valid.")',
        'raise Unauthorized("The API key is not valid.")',
        IN_API + "test_credentials.py::test_a_key_of_the_other_interface_is_unauthorized_and_its_holder_learns_why",
    ),
    Protection(
        "403 helps who sends a LoRA's name in place of its id",
        "serve_app/service/submit.py",
        """return f"{field}: must be an id, not a name; send {' or '.join(ids)}" if ids else \"\"""",
        'return ""',
        IN_API + "test_isolation.py::test_a_name_in_place_of_an_id_is_answered_with_the_id",
    ),
    Protection(
        "and tells no name that the account may not use",
        "serve_app/service/submit.py",
        "    usable = await resources.catalog.adapters(caller.account_id)\n    ids",
        "    usable = [a for each in await resources.accounts.ids() for a in await resources.catalog.adapters(each)]\n    ids",
        IN_API + "test_isolation.py::test_a_name_in_place_of_an_id_is_answered_with_the_id",
    ),
    Protection(
        "NaN is refused by the name of its field",
        "serve_app/api/strict_json.py",
        "            parse_constant=float,\n",
        '            parse_constant=lambda _: _number("1e999"),\n',
        IN_API + "test_bodies.py::test_what_is_no_number_is_refused_with_the_field_and_its_range",
    ),
    # what a buyer expects
    Protection(
        "a prompt is moderated before it is accepted",
        "serve_app/service/submit.py",
        "    if not verdict.allowed:\n",
        "    if False:\n",
        "tests/service/test_moderation.py::test_a_refused_prompt_is_not_accepted",
    ),
    Protection(
        "an image is moderated before it is stored",
        "serve_app/service/attempt.py",
        "        if not verdict.allowed:\n",
        "        if False:\n",
        "tests/service/test_moderation.py::test_a_refused_image_is_not_stored_and_its_job_fails",
    ),
    Protection(
        "a deleted job's images go from the storage",
        "serve_app/service/delete.py",
        "        if objects is not None:\n",
        "        if False:\n",
        IN_API + "test_deletion.py::test_a_deleted_job_was_never_there",
    ),
    Protection(
        "a deletion of an account is verified",
        "serve_app/service/delete_account.py",
        "left=[*left, *images]",
        "left=[]",
        "tests/service/test_delete_account.py::test_what_still_names_the_account_is_reported",
    ),
    Protection(
        "its password is not guessed with a key",
        "serve_app/service/password_check.py",
        "    if counted.wait:\n",
        "    if False:\n",
        IN_API + "test_account.py::test_passwords_are_not_guessed_with_a_key",
    ),
    Protection(
        "a deletion of an account that was cut short is finished",
        "serve_app/service/reap.py",
        "            await finish_removals(resources)\n",
        "",
        "tests/service/test_delete_account.py::test_a_deletion_that_was_cut_short_is_finished_by_the_housekeeper",
    ),
    Protection(
        "the name of a deleted account belongs to its next holder",
        "serve_app/stores/scripts/remove_account.lua",
        "if redis.call('GET', K('name:' .. name)) == account then",
        "if true then",
        "tests/service/test_delete_account.py::test_a_deletion_that_was_cut_short_is_finished_by_the_housekeeper",
    ),
    Protection(
        "the audit log is append-only",
        "serve_app/stores/scripts/append_audit.lua",
        "redis.call('XTRIM', name, 'MINID',",
        "redis.call('DEL', name) redis.call('XTRIM', name, 'MINID',",
        "tests/stores/test_audit_log.py::test_the_log_is_append_only",
    ),
)


def fails_without(protection: Protection, folder: Path) -> bool:
    """Return whether the test fails in a copy of the repository without the protection.

    Raises `AssertionError` when it cannot be run.
    """
    for path in ROOT.iterdir():
        if path.name in COPIED and path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
        elif path.name in COPIED:
            shutil.copy(path, folder / path.name)
        elif path.name not in (".git", "var"):
            (folder / path.name).symlink_to(path)
    for file, old, new in protection.changes:
        planted = folder / file
        planted.write_text(planted.read_text().replace(old, new))
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", protection.test)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode in (0, FAILED), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode == FAILED
