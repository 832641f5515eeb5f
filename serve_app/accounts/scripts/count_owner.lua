-- include window
-- args: account_id, rate_token
-- count_owner: counts a request that an account's owner makes in the console in its plan, as one with a key.
-- Returns what caller.lua returns.
local account = redis.call('HMGET', K('account:' .. account_id), 'name', 'disabled', 'plan_' .. interface)
if not account[1] or account[2] then return refused('unknown') end
local status, plan, used, ends, limit = count_request(rate_token, account_id, account[3], '', nil)
return {status, account_id, account[1], plan, used, ends, now, '', '', limit, ''}
