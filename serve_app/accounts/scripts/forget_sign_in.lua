-- args: counted_at
-- forget_sign_in: takes back all tries of a source after the right password, so that they no longer count among
-- those from everywhere either. `counted_at` names the source, as sign_in.lua answered. Tries of others stay.
local who, source = string.match(counted_at, '^sign_in:(.*):(%a+)_%x+$')
local tries, all = num(redis.call('HGET', K(counted_at), 'tries'), 0), K('sign_in_tries:' .. who)
redis.call('DEL', K(counted_at))
if source == 'address' and redis.call('EXISTS', all) == 1 then redis.call('DECRBY', all, tries) end
