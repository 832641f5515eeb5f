-- include credential_version
-- args: token_digest, account, user, credential_version, browser, address, idle_ms:number, life_ms:number
-- open_session: a session of an account's user. `credential_version` is that of the password or link it was opened
-- with, '' for the user's own of now. Repeating the call changes nothing but when it ends.
local session = K('session:' .. token_digest)
if credential_version == '' then credential_version = user_credential_version(account, user) end
write_also_when_full()
redis.call('HSET', session, 'account', account, 'user', user, 'credential_version', credential_version,
  'browser', browser, 'address', address, 'opened', now, 'seen', now, 'ends', now + life_ms)
redis.call('PEXPIRE', session, idle_ms)
redis.call('SADD', K('sessions:' .. account), token_digest)
redis.call('PEXPIRE', K('sessions:' .. account), life_ms)
return 1
