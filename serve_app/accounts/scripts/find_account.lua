-- include account
-- args: id_or_name
-- find_account: an account by its id or its name, in one round trip whether it exists or not. Returns {id, record}.
local id = account_id_of(id_or_name)
return {id, redis.call('HGETALL', K('account:' .. id))}
