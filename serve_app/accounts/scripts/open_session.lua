-- include credential_version
-- args: realm, token_digest, holder, id, credential_version, browser, address, idle_ms:number, life_ms:number
-- open_session: opens a session of a holder (credential_version.lua), on the list of the account or operator `id`.
-- `credential_version` is that of the password or link it was opened with, '' for the holder's present one.
-- Repeating the call changes nothing but when it ends.
local session, list = K(realm .. 'session:' .. token_digest), K(realm .. 'sessions:' .. id)
if credential_version == '' then credential_version = credential_version_of(holder) end
write_also_when_full()
redis.call('HSET', session, 'holder', holder, 'credential_version', credential_version, 'browser', browser,
  'address', address, 'opened', now, 'seen', now, 'ends', now + life_ms)
redis.call('PEXPIRE', session, idle_ms)
redis.call('SADD', list, token_digest)
redis.call('PEXPIRE', list, life_ms)
