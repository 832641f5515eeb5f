-- The account that a text names: by its id or by its name; '' when there is none.
local function account_id_of(id_or_name)
  if redis.call('EXISTS', K('account:' .. id_or_name)) == 1 then return id_or_name end
  return redis.call('GET', K('name:' .. id_or_name)) or ''
end
