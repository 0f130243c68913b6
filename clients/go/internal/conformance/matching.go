package main

import (
	"encoding/json"
	"fmt"
	"math/big"
	"regexp"
	"strconv"
	"strings"
)

// fill puts saved values in the place of "$name", and writes repetitions out.
func fill(value interface{}, saved object) (interface{}, error) {
	switch value := value.(type) {
	case string:
		if !strings.HasPrefix(value, "$") {
			return value, nil
		}
		found, ok := saved[value[1:]]
		if !ok {
			return nil, fmt.Errorf("nothing was saved as %s", value)
		}
		return found, nil
	case []interface{}:
		filled := []interface{}{}
		for _, element := range value {
			below, err := fill(element, saved)
			if err != nil {
				return nil, err
			}
			filled = append(filled, below)
		}
		return filled, nil
	case object:
		if repeat, ok := value["$repeat"].([]interface{}); ok {
			return repeated(repeat[0], repeat[1], saved)
		}
		filled := object{}
		for key, element := range value {
			below, err := fill(element, saved)
			if err != nil {
				return nil, err
			}
			filled[key] = below
		}
		return filled, nil
	}
	return value, nil
}

func repeated(element, times interface{}, saved object) (interface{}, error) {
	n, ok := number(times)
	if !ok {
		return nil, fmt.Errorf("%v is no number of copies", times)
	}
	if text, ok := element.(string); ok {
		return strings.Repeat(text, int(n.Int64())), nil
	}
	copies := []interface{}{}
	for i := int64(0); i < n.Int64(); i++ {
		below, err := fill(element, saved)
		if err != nil {
			return nil, err
		}
		copies = append(copies, below)
	}
	return copies, nil
}

var part = regexp.MustCompile(`\w+`)

// lookUp follows a path such as "leases[0].state".
func lookUp(value interface{}, path string) (interface{}, error) {
	for _, name := range part.FindAllString(path, -1) {
		switch below := value.(type) {
		case object:
			value = below[name]
		case []interface{}:
			at, err := strconv.Atoi(name)
			if err != nil || at >= len(below) {
				return nil, fmt.Errorf("%s is not in the answer", path)
			}
			value = below[at]
		default:
			return nil, fmt.Errorf("%s is not in the answer", path)
		}
	}
	return value, nil
}

// mismatches returns the differences, one sentence each; none if it matches.
func mismatches(expected, actual interface{}, path string) (found []string, err error) {
	switch wanted := expected.(type) {
	case object:
		isOperator := false
		for key, operand := range wanted {
			if strings.HasPrefix(key, "$") {
				isOperator = true
				holds, err := operate(key, operand, actual)
				if err != nil {
					return nil, err
				}
				if !holds {
					found = append(found, fmt.Sprintf("%s is %v, which fails %s %v", path, actual, key, operand))
				}
			}
		}
		if isOperator {
			return found, nil
		}
		fields, ok := actual.(object)
		if !ok {
			return []string{fmt.Sprintf("%s is %v, not an object", path, actual)}, nil
		}
		for key, element := range wanted {
			below, err := mismatches(element, fields[key], strings.TrimPrefix(path+"."+key, "."))
			if err != nil {
				return nil, err
			}
			found = append(found, below...)
		}
		return found, nil
	case []interface{}:
		list, ok := actual.([]interface{})
		if !ok || len(list) != len(wanted) {
			return []string{fmt.Sprintf("%s is %v, not a list of %d", path, actual, len(wanted))}, nil
		}
		for at := range wanted {
			below, err := mismatches(wanted[at], list[at], fmt.Sprintf("%s[%d]", path, at))
			if err != nil {
				return nil, err
			}
			found = append(found, below...)
		}
		return found, nil
	}
	if !equal(expected, actual) {
		found = append(found, fmt.Sprintf("%s is %v, not %v", path, actual, expected))
	}
	return found, nil
}

func operate(operator string, operand, actual interface{}) (bool, error) {
	has := func(choices []interface{}, matches func(interface{}) ([]string, error)) (bool, error) {
		for _, choice := range choices {
			found, err := matches(choice)
			if err != nil || len(found) == 0 {
				return err == nil, err
			}
		}
		return false, nil
	}
	switch operator {
	case "$min", "$max":
		bound, _ := number(operand)
		n, ok := number(actual)
		if !ok {
			return false, nil
		}
		if operator == "$min" {
			return n.Cmp(bound) >= 0, nil
		}
		return n.Cmp(bound) <= 0, nil
	case "$one_of":
		return has(operand.([]interface{}), func(choice interface{}) ([]string, error) {
			return mismatches(choice, actual, "")
		})
	case "$not":
		found, err := mismatches(operand, actual, "")
		return len(found) > 0, err
	case "$has":
		if text, ok := actual.(string); ok {
			wanted, ok := operand.(string)
			return ok && strings.Contains(text, wanted), nil
		}
		list, _ := actual.([]interface{})
		return has(list, func(element interface{}) ([]string, error) {
			return mismatches(operand, element, "")
		})
	}
	return false, fmt.Errorf("%s is no operator", operator)
}

var integer = regexp.MustCompile(`^-?\d+$`)

func number(value interface{}) (*big.Int, bool) {
	text := ""
	switch value := value.(type) {
	case json.Number:
		text = value.String()
	case string:
		text = value
	}
	if !integer.MatchString(text) {
		return nil, false
	}
	return new(big.Int).SetString(text, 10)
}

func equal(expected, actual interface{}) bool {
	if n, ok := number(expected); ok {
		found, ok := number(actual)
		return ok && n.Cmp(found) == 0
	}
	return expected == actual
}
