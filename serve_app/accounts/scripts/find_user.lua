-- include account
-- include credential_version
-- args: id_or_name, within
-- find_user: who signs in with a name, in one round trip whether there is one or not. Returns {account, user,
-- credential version, the account's record, the user's}, where the user is '' for the account's own. `within` is the
-- account to look in, '' for all.
local found = account_id_of(id_or_name, within)
local account, user = string.match(found, '^([^:]*):?(.*)$')
local own = user ~= '' and redis.call('HGETALL', K('user:' .. found)) or {}
return {account, user, credential_version_of('account:' .. found), redis.call('HGETALL', K('account:' .. account)), own}
