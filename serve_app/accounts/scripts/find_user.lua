-- include account
-- include credential_version
-- args: id_or_name, within
-- find_user: who signs in with a name, in one round trip whether there is one or not. Returns {account, user,
-- credential version, the account's record, the user's}, where the user is '' for the account's own. `within` is the account
-- to look in, '' for all.
local account, user = string.match(account_id_of(id_or_name, within), '^([^:]*):?(.*)$')
local own = user ~= '' and redis.call('HGETALL', K('user:' .. account .. ':' .. user)) or {}
return {account, user, user_credential_version(account, user), redis.call('HGETALL', K('account:' .. account)), own}
