-- args: began_after, new_base_models, widths, set_aside, taken
-- end_catalog: the catalog file is applied. Returns 1, or 0 where another file was since `began_after`, the time that
-- `apply_catalog` answered: apply this one again.
if (redis.call('HGET', K('catalog'), 'applied') or '') ~= began_after then return 0 end
redis.call('HSET', K('catalog'), 'applied', now, 'set_aside', set_aside, 'base_models', new_base_models,
  'widths', widths, 'taken', taken)
redis.call('HDEL', K('catalog'), 'moved')
return 1
