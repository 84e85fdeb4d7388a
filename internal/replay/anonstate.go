package replay

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"ztun.dev/ztun/internal/workload"
)

// State replaces addresses and names of a state of the mesh, in the way that those of packets are. Matches of policies by the
// beginning or the end of a text are replaced word by word: a part of a word does not match any more.
func (a *Anonymizer) State(st workload.State) workload.State {
	return a.value(reflect.ValueOf(st), "").Interface().(workload.State)
}

// value is a copy of v in which everything is replaced. field is the field that it is of.
func (a *Anonymizer) value(v reflect.Value, field string) reflect.Value {
	switch x := v.Interface().(type) {
	case netip.Addr:
		return reflect.ValueOf(a.Addr(x))
	case netip.Prefix:
		return reflect.ValueOf(a.Prefix(x))
	}
	out := reflect.New(v.Type()).Elem()
	switch v.Kind() {
	case reflect.String:
		switch field {
		case "UID":
			out.SetString(a.UID(v.String()))
		case "Hostname": // as in DNS messages
			out.SetString(a.Text(strings.ToLower(v.String())))
		default:
			out.SetString(a.Text(v.String()))
		}
	case reflect.Pointer:
		if v.IsNil() {
			return v
		}
		p := reflect.New(v.Type().Elem())
		p.Elem().Set(a.value(v.Elem(), field))
		return p
	case reflect.Slice:
		if v.IsNil() {
			return v
		}
		out.Set(reflect.MakeSlice(v.Type(), v.Len(), v.Len()))
		for i := range v.Len() {
			out.Index(i).Set(a.value(v.Index(i), field))
		}
	case reflect.Map:
		if v.IsNil() {
			return v
		}
		out.Set(reflect.MakeMapWithSize(v.Type(), v.Len()))
		keys := v.MapKeys() // in an order of their own: which of two short words comes first may count
		slices.SortFunc(keys, func(x, y reflect.Value) int { return strings.Compare(fmt.Sprint(x), fmt.Sprint(y)) })
		for _, k := range keys {
			out.SetMapIndex(a.value(k, field), a.value(v.MapIndex(k), field))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			out.Field(i).Set(a.value(v.Field(i), v.Type().Field(i).Name))
		}
	default:
		return v
	}
	return out
}
