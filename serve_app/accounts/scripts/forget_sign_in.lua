-- args: counted_at
-- forget_sign_in: after the right password, takes back all tries of its source, which is named as `sign_in` answered: they no
-- longer count among those from everywhere either. Of others' tries, none is forgotten.
local who, source = string.match(counted_at, '^sign_in:(.*):(%a+)_%x+$')
local tries, all = num(redis.call('HGET', K(counted_at), 'tries'), 0), K('sign_in_tries:' .. who)
redis.call('DEL', K(counted_at))
if source == 'address' and redis.call('EXISTS', all) == 1 then redis.call('DECRBY', all, tries) end
